"""Load balancing: ranks of unequal speed get unequal parts of each global batch.

In: seconds of steps on each rank. Out: how many rows or replicas each gets of the next global batches. Start with
`load_balance`.
"""
