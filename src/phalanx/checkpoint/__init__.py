"""Checkpoints: save, load anywhere, resume, leave in time, export."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.errors import did_you_mean

if TYPE_CHECKING:
    from phalanx.checkpoint.background import wait
    from phalanx.checkpoint.checkpointer import Checkpointer
    from phalanx.checkpoint.export import export_onnx, export_program, export_state_dict
    from phalanx.checkpoint.loading import Loaded, load
    from phalanx.checkpoint.saving import save

_HOMES = {
    "Checkpointer": "checkpointer",
    "Loaded": "loading",
    "export_onnx": "export",
    "export_program": "export",
    "export_state_dict": "export",
    "load": "loading",
    "save": "saving",
    "wait": "background",
}

__all__ = [
    "Checkpointer",
    "Loaded",
    "export_onnx",
    "export_program",
    "export_state_dict",
    "load",
    "save",
    "wait",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx.checkpoint' has no attribute {name!r}.{did_you_mean(name, __all__)}")
    return getattr(importlib.import_module(f"phalanx.checkpoint.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
