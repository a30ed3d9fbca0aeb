"""Optimizer step hooks, and what they use: norms, learning rate, parameter replacement.

Start with `hooks`.
"""
