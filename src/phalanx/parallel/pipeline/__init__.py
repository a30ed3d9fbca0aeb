"""Pipeline parallel: stages of a model on different ranks, micro-batches between them.

Start with `engine`.
"""
