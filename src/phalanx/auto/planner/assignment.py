"""What a Plan decides for a captured model, as the cost model takes it (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.auto.capture.layers import LayerStrategy
from phalanx.auto.cost.parallel_config import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A parallel config, and a strategy for every call of a module."""

    config: ParallelConfig
    call_strategies: tuple[LayerStrategy, ...]
    """How each call is computed."""

    stages: tuple[str, ...]
    """The units that stages 1, 2, ... of a pipeline begin with."""
