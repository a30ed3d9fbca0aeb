"""Sampling: shuffling, sharding over ranks, seeds and random streams.

In: a seed, an epoch, sizes. Out: which rows make which global batch, which of them are this rank's, and their random
numbers. Pure arithmetic, except `seeding` and `loader_seed`. Start with `order`.
"""
