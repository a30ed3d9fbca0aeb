"""`ShardedLoader`: the data loader that shards every global batch over ranks.

In: a dataset and a global batch. Out: this rank's batches with their share of the global batch, and a state to continue
from. Start with `loader`.
"""
