"""What a search found: the Plan with its figures, as a table and as a picture.

Pure. Start with `result`.
"""
