"""`save_tables`, `load_tables`: save and load parameter-server tables as part of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from phalanx.checkpoint.ranks import Ranks
from phalanx.parallel.model_shape import is_handle
from phalanx.parallel.session import applied_to


def has_tables(model: nn.Module) -> bool:
    """Return whether rows or parameters of a model live in tables."""
    applied = applied_to(model)
    return (applied is not None and bool(applied.plan.tables)) or any(is_handle(p) for p in model.parameters())


def save_tables(ranks: Ranks, folder: Path, model: nn.Module) -> None:
    """Write a consistent snapshot of the tables of a job, if the model has any.

    Collective. Every worker flushes its pending updates; worker 0 then asks the servers to write.
    """
    if not has_tables(model):
        return
    from phalanx.parallel import tables  # imported only by jobs with tables
    from phalanx.ps.client import table_client

    ranks.decide("flushed", table_client.current().mode.flush, _nothing)
    ranks.decide("tables", lambda: tables.save(folder, "full") if ranks.rank == 0 else None, _nothing)


def load_tables(folder: Path) -> None:
    """Replace the tables of a job by those of a checkpoint. Collective."""
    from phalanx.parallel import tables

    tables.load(folder, None)


def _nothing(_: list[Any]) -> None:
    return None
