"""Data for training: which rows each rank gets, the loader that hands them out, and readers of real files."""

from phalanx.data.loader import ShardedLoader

__all__ = ["ShardedLoader"]
