"""The embedding table: settings, update rules, native and NumPy implementation.

Start with `rules`, then `table`.
"""
