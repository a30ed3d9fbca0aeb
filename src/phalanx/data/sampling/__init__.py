"""Sampling: shuffling, sharding over ranks, seeds and random streams.

Pure arithmetic. Start with `order`.
"""
