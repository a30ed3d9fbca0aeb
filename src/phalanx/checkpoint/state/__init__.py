"""Collect and restore the training state of a rank.

Start with `capture`.
"""
