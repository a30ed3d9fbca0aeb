"""ZeRO: optimizer state, gradients and parameters sharded over ranks, on torch's `fully_shard`.

In: a model and the parameters that a Plan shards. Out: units whose parameters are gathered when they compute, and
gradients reduced to shards. Start with `sharded`. Where ranks may leave and join it is another one: `elastic_plan`, and
`parallel.elastic`.
"""
