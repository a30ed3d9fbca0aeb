"""Collectives that carry gradients, agreement between ranks, and this process's Context."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.errors import did_you_mean
from phalanx.versions import require_torch

if TYPE_CHECKING:
    from phalanx.comm.agreement import agree, barrier, share
    from phalanx.comm.collectives import (
        all_gather,
        all_gather_list,
        all_reduce,
        all_to_all,
        broadcast,
        reduce_scatter,
    )
    from phalanx.comm.groups import new_group
    from phalanx.comm.point_to_point import recv, send

# Everything that touches torch imports this package: an unfit torch is named here, not by a traceback from inside it.
require_torch()

_HOMES = {
    "agree": "agreement",
    "all_gather": "collectives",
    "all_gather_list": "collectives",
    "all_reduce": "collectives",
    "all_to_all": "collectives",
    "barrier": "agreement",
    "broadcast": "collectives",
    "new_group": "groups",
    "recv": "point_to_point",
    "reduce_scatter": "collectives",
    "send": "point_to_point",
    "share": "agreement",
}

__all__ = [
    "agree",
    "all_gather",
    "all_gather_list",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "new_group",
    "recv",
    "reduce_scatter",
    "send",
    "share",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx.comm' has no attribute {name!r}.{did_you_mean(name, __all__)}")
    value = getattr(importlib.import_module(f"phalanx.comm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
