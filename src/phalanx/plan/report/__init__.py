"""A Plan in words, tables and pictures, and the difference of two.

Start with `explain`.
"""
