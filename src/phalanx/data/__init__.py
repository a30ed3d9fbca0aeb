"""Data for training: which rows each rank gets, the loader that hands them out, and readers of real files."""

from phalanx.data.cifar import Cifar10Dataset
from phalanx.data.digits import DigitsDataset
from phalanx.data.flowers import FlowersDataset
from phalanx.data.idx import IdxDataset, read_idx
from phalanx.data.labels import check_labels
from phalanx.data.loader import ShardedLoader

__all__ = [
    "Cifar10Dataset",
    "DigitsDataset",
    "FlowersDataset",
    "IdxDataset",
    "ShardedLoader",
    "check_labels",
    "read_idx",
]
