"""Logical replicas: a fixed number of shares of each global batch, whichever rank computes which.

In: a Plan with `replicas`, a mesh, perhaps the record of a checkpoint. Out: which replicas each rank runs in turn, and
optimizer steps that wait for the last of them. Their gradients are added up in `parallel/data/replicas`. Start with
`assign`.
"""
