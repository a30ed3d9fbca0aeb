"""Checkpoints: save, load at any number of ranks, resume, stop gracefully, export.

In: models, optimizers, loaders and what else a run continues with. Out: folders that any number of ranks can load, or
none is left half written. Start with `saving` and `loading`; `state` collects and restores, `folder` and `tensors` are
what is on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.checkpoint.background import wait
    from phalanx.checkpoint.checkpointer import Checkpointer
    from phalanx.checkpoint.export.export import export_onnx, export_program, export_state_dict
    from phalanx.checkpoint.loading import Loaded, load
    from phalanx.checkpoint.saving import save

_HOMES = {
    "Checkpointer": "checkpointer",
    "Loaded": "loading",
    "export_onnx": "export.export",
    "export_program": "export.export",
    "export_state_dict": "export.export",
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


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
