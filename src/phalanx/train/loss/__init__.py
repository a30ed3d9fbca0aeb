"""Losses as means over all ranks, label checks, splitting batches into inputs and target.

In: a batch, and a loss function or a model that returns one. Out: a loss whose gradient is that of the mean over the
whole global batch. Start with `batch_reader`.
"""
