"""`TorchMetric`: torchmetrics objects over all ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm import context
from phalanx.errors import ConfigError
from phalanx.train.metrics.base import AllRanks


class TorchMetric:
    """A torchmetrics object as a `GlobalMetric`: updated with samples that count, its states combined by its own rules.

    Its states travel over the ranks that hold their own samples, and not over torch's default group, where samples that
    several ranks hold would count several times.
    """

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._parts = [part for part in metric.modules() if hasattr(part, "dist_sync_fn")]
        for part in self._parts:
            _check_states(part)
        if context.is_initialized() and isinstance(metric, nn.Module):
            metric.to(context.current().device)

    def reset(self) -> None:
        """Forget all samples."""
        self._metric.reset()

    def update(self, output: Any, target: Any) -> None:
        """Count a batch."""
        self._metric.update(output, target)

    def compute(self, ranks: AllRanks) -> Any:
        """Return what the object computes, one number as a float."""
        with self._synced_over(ranks), warnings.catch_warnings():
            # A rank without samples of its own is no mistake here.
            warnings.filterwarnings("ignore", "The ``compute`` method of metric")
            value = self._metric.compute()
        return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else _plain(value)

    @contextlib.contextmanager
    def _synced_over(self, ranks: AllRanks) -> Iterator[None]:
        """Let the parts of the object gather over our ranks, through the two hooks of torchmetrics."""

        def gathered(state: Tensor, group: Any = None) -> list[Tensor]:
            return [
                rows.reshape(state.shape) if state.ndim == 0 else rows for rows in ranks.parts(torch.atleast_1d(state))
            ]

        before = [(part, part.dist_sync_fn, part.distributed_available_fn) for part in self._parts]
        for part in self._parts:
            part.dist_sync_fn, part.distributed_available_fn = gathered, lambda: ranks.count > 1
        try:
            yield
        finally:
            for part, sync, available in before:
                part.dist_sync_fn, part.distributed_available_fn = sync, available


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def is_torch_metric(metric: Any) -> bool:
    """Return whether an object is one of torchmetrics, by what it has."""
    return isinstance(metric, nn.Module) and all(hasattr(metric, name) for name in ("update", "compute", "reset"))


def _check_states(part: Any) -> None:
    """Refuse states that ranks with different numbers of samples cannot combine, before a collective hangs on it."""
    for name, reduction in part._reductions.items():
        if isinstance(part._defaults[name], list) and getattr(reduction, "__name__", "") != "dim_zero_cat":
            raise ConfigError(
                f"{type(part).__name__} keeps {name!r} as a list that it does not put together by rows, so it cannot "
                "be computed over several ranks. Use another, or write an object with reset, update and compute."
            )
