"""Data parallel: gradients averaged in buckets while backward runs, exact on uneven batches.

Start with `reducer`.
"""
