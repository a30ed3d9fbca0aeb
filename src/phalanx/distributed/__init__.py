"""`phalanx.distributed`: old import paths of Fleet, the launchers and the basic API.

`from phalanx.distributed import fleet` and `import phalanx.distributed.fleet` both give `phalanx.fleet`
itself.
"""

from __future__ import annotations

import importlib
from typing import Any

from phalanx.old_names import missing

_HOMES = {
    "DataParallel": "phalanx.parallel.distribute",
    "DistributedStrategy": "phalanx.strategy",
    "all_gather": "phalanx.comm.collectives",
    "all_reduce": "phalanx.comm.collectives",
    "get_rank": "phalanx.fleet",
    "get_world_size": "phalanx.fleet",
    "init_parallel_env": "phalanx.fleet",
    "prepare_context": "phalanx.fleet",
}
_MODULES = ("fleet", "launch", "launch_ps")

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"phalanx.distributed.{name}")
    if name not in _HOMES:
        raise missing("phalanx.distributed", name, __all__)
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
