"""ZeRO: optimizer state, gradients and parameters sharded over ranks, on torch's `fully_shard`.

Start with `sharded`.
"""
