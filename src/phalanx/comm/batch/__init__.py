"""Which batch, replica and share of a global batch this rank computes on.

In: what loaders give out, and forward and backward passes. Out: the share and the replica that gradients are of. Start
with `batches`, then `replicas`.
"""
