"""ZeRO: optimizer state, gradients and parameters sharded over ranks, on torch's `fully_shard`.

Start with `sharded`. Where ranks may leave and join it is another one: `elastic_plan`, and `parallel.elastic`.
"""
