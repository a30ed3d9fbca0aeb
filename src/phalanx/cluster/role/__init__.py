"""Who this process is, from whatever launched it.

Start with `role`.
"""
