"""One table of rows: its rules, its layout, the native table and its NumPy twin.

Start with `rules`, then `table`.
"""
