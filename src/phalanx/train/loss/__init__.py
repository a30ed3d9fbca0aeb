"""Losses as means over all ranks, labels that fit, batches as inputs and targets.

Start with `batches`.
"""
