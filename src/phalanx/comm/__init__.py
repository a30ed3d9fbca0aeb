"""Collectives with autograd, agreement between ranks, and this process's `Context`.

In: tensors and JSON values of each rank. Out: what all ranks have together, or one error on all of them. Start with
`context` (who this rank is), then `collectives`; `process_group` and `store` are below them, `shared_memory` is a
backend of our own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names
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


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
