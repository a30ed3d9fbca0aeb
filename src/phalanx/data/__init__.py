"""Data for training: which rows each rank gets, the loader that hands them out, and readers of real files."""

from typing import Any

from phalanx.data import vision
from phalanx.data.cifar import Cifar10Dataset
from phalanx.data.criteo import criteo_schema
from phalanx.data.digits import DigitsDataset
from phalanx.data.download import download
from phalanx.data.flowers import FlowersDataset
from phalanx.data.generator import GeneratorDataset
from phalanx.data.idx import FashionMnistDataset, IdxDataset, MnistDataset, read_idx
from phalanx.data.in_memory import InMemoryDataset
from phalanx.data.labels import check_labels
from phalanx.data.loader import ShardedLoader
from phalanx.data.pipeline import Pipeline
from phalanx.data.queue import QueueDataset
from phalanx.data.slots import SlotSchema
from phalanx.old_names import missing

__all__ = [
    "Cifar10Dataset",
    "DigitsDataset",
    "FashionMnistDataset",
    "FlowersDataset",
    "GeneratorDataset",
    "IdxDataset",
    "InMemoryDataset",
    "MnistDataset",
    "Pipeline",
    "QueueDataset",
    "ShardedLoader",
    "SlotSchema",
    "check_labels",
    "criteo_schema",
    "download",
    "read_idx",
    "vision",
]


def __getattr__(name: str) -> Any:
    raise missing("phalanx.data", name, __all__)
