"""Data loading: sharded loader, pipelines, dataset readers, sampling.

In: datasets of torch, files of known formats, generators. Out: batches of this rank, such that the global batches do
not depend on the number of ranks. Start with `loader`, then `sampling`; `pipeline`, `stream`, `readers`, `ctr` and
`vision` are what it loads from.
"""

from typing import Any

from phalanx.data import vision
from phalanx.data.ctr.in_memory_dataset import InMemoryDataset
from phalanx.data.ctr.queue_dataset import QueueDataset
from phalanx.data.ctr.slots import SlotSchema, criteo_schema
from phalanx.data.loader.loader import ShardedLoader
from phalanx.data.pipeline.pipeline import Pipeline
from phalanx.data.readers.cifar import Cifar10Dataset
from phalanx.data.readers.digits import DigitsDataset
from phalanx.data.readers.download import download
from phalanx.data.readers.flowers import FlowersDataset
from phalanx.data.readers.idx import FashionMnistDataset, IdxDataset, MnistDataset, read_idx
from phalanx.data.samples.labels import check_labels
from phalanx.data.stream.generator_dataset import GeneratorDataset
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
