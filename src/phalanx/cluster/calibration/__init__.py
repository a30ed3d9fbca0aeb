"""Measured speed of machines.

Pure. Start with `figures`.
"""
