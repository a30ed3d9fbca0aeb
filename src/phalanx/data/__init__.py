"""Data loading: sharded loader, pipelines, dataset readers, sampling.

In: datasets of torch, files of known formats, generators. Out: batches of this rank, such that the global batches do
not depend on the number of ranks. Start with `loader`, then `sampling`; `pipeline`, `stream`, `readers`, `ctr` and
`vision` are what it loads from.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.lazy import lazy_names
from phalanx.old_names import missing

if TYPE_CHECKING:  # names resolved by __getattr__ below, so that orders and rows of tables cost no torch
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

_HOMES = {
    "Cifar10Dataset": "readers.cifar",
    "DigitsDataset": "readers.digits",
    **dict.fromkeys(("FashionMnistDataset", "IdxDataset", "MnistDataset", "read_idx"), "readers.idx"),
    "FlowersDataset": "readers.flowers",
    "GeneratorDataset": "stream.generator_dataset",
    "InMemoryDataset": "ctr.in_memory_dataset",
    "Pipeline": "pipeline.pipeline",
    "QueueDataset": "ctr.queue_dataset",
    "ShardedLoader": "loader.loader",
    **dict.fromkeys(("SlotSchema", "criteo_schema"), "ctr.slots"),
    "check_labels": "samples.labels",
    "download": "readers.download",
}

_resolve, _ = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name == "vision":
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise missing("phalanx.data", name, __all__)
    return _resolve(name)


def __dir__() -> list[str]:
    return sorted(__all__)
