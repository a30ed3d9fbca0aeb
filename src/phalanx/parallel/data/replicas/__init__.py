"""Data parallel over logical replicas: gradients and buffers of one global batch, whichever rank computes which.

In: gradients of each replica in turn. Out: one sum in a fixed order, with the same bits on any number of ranks. Start
with `replica_round`, then `replica_sums`.
"""
