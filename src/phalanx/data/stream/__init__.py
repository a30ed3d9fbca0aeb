"""Data that can only be read one sample after the other.

Start with `stream`.
"""
