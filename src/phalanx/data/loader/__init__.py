"""`ShardedLoader`: the data loader that shards every global batch over ranks.

Start with `loader`.
"""
