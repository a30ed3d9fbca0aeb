"""Readers of real datasets and files.

Start with `images`.
"""
