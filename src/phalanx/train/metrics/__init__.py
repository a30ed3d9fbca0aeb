"""Metrics over the samples of all ranks, exact.

In: predictions and labels of this rank. Out: one value, the same on all ranks and of every sample once. Start with
`base`, then `accuracy`.
"""
