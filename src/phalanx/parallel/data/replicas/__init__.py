"""Data parallel over logical replicas: gradients and buffers of one global batch, whichever rank computes which.

Start with `replica_round`, then `replica_sums`.
"""
