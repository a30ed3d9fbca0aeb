"""Losses as means over all ranks, label checks, splitting batches into inputs and target.

Start with `batch_reader`.
"""
