"""The loader that users iterate over: each rank gets its shard of every global batch.

Start with `loader`.
"""
