"""Parameter servers: tables of rows that many workers train, a place where a parameter of a Plan can live."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.errors import did_you_mean

if TYPE_CHECKING:  # names resolved by __getattr__ below, so that values cost no torch and embeddings no server
    from phalanx.ps.ahead import prefetch
    from phalanx.ps.embedding import SparseEmbedding, lookup
    from phalanx.ps.rules import (
        FTRL,
        SGD,
        Adagrad,
        Adam,
        Constant,
        CountFilter,
        Momentum,
        Normal,
        Probability,
        RMSprop,
        RowWiseAdagrad,
        ShowClick,
        Uniform,
    )

_HOMES = {"SparseEmbedding": "embedding", "lookup": "embedding", "prefetch": "ahead"}

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Constant",
    "CountFilter",
    "Momentum",
    "Normal",
    "Probability",
    "RMSprop",
    "RowWiseAdagrad",
    "ShowClick",
    "SparseEmbedding",
    "Uniform",
    "lookup",
    "prefetch",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'phalanx.ps' has no attribute {name!r}.{did_you_mean(name, __all__)}")
    value = getattr(importlib.import_module(f"phalanx.ps.{_HOMES.get(name, 'rules')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
