"""Metrics over the samples of all ranks, exact.

Start with `accuracy`.
"""
