"""Data parallel: gradients averaged in buckets while backward runs, exact on uneven batches.

In: gradients, as backward computes them. Out: their mean over all samples of the global batch, in `.grad`, when
backward returns. Start with `reducer`, then `bucket_buffers` and `grad_reduction`.
"""
