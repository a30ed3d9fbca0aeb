"""Evaluation whose result does not depend on the number of ranks."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from phalanx.comm import context
from phalanx.comm.agreement import agree
from phalanx.data.loader import ShardedLoader
from phalanx.errors import ConfigError, did_you_mean
from phalanx.train.metrics import sum_over_ranks, topk_correct

logger = logging.getLogger("phalanx.train")

Metric = Callable[[Tensor, Any], Tensor]
"""From (output, target) to one value per row, shape (N,), or to the mean over the rows, no dimensions."""

PROGRESS_EVERY_S = 10.0
"""Seconds between two lines of progress."""


def evaluate(
    model: nn.Module,
    data: Any,
    metrics: Iterable[str | Metric] | Mapping[str, str | Metric] = ("acc1",),
    *,
    loss_fn: Callable[[Tensor, Any], Tensor] | None = None,
    batch_size: int | None = None,
    forward: Callable[[nn.Module, Any], tuple[Tensor, Any]] | None = None,
) -> dict[str, float]:
    """Return each metric's mean over all rows of `data`.

    Collective: every rank must call it. Each row counts once, on one rank; sums are added up in int64 for
    yes-or-no and whole-number metrics, in float64 for the others, so N ranks give the result of one process (the
    latter up to the rounding of a sum). Runs without gradients and in evaluation mode; afterwards each module is
    in the mode it was in.

    Args:
        model: The model, wrapped or not.
        data: Anything `ShardedLoader` takes. Every row is used, also where a DataLoader says drop_last.
        metrics: Names (`acc<k>` for the top-k accuracy, `loss`) or functions; a mapping names them itself.
        loss_fn: What `loss` means; added under that name when given. A mean over the batch, or one value a row.
        batch_size: Rows per rank; a DataLoader's own, or 64 when omitted.
        forward: From (model, batch) to (output, target), for batches other than (input, ..., target).

    Raises:
        ConfigError: If a metric is unknown, a batch has another shape, or a metric returns something else. On all
            ranks, if they ask for different metrics, hold different numbers of rows, or are at different calls.
        PeerLostError: If a rank has ended, or did not call it within 300 s; names it.
    """
    chosen = read_metrics(metrics, loss_fn)
    loader = _loader(data, batch_size)
    _meet(chosen, loader)
    totals: dict[str, Tensor] = {}
    count = 0
    with evaluation_mode(model), torch.no_grad():
        for step, batch in enumerate(_with_progress(loader)):
            assert loader.share is not None
            out, target = (forward or forward_tuple)(model, batch)
            count += loader.share.rows
            for name, metric in chosen.items():
                value = row_sum(name, metric(out, target), len(out), loader.share.rows)
                totals[name] = totals[name] + value if step else value
    return _means(totals, count, chosen)


def _meet(chosen: Mapping[str, Metric], loader: ShardedLoader) -> None:
    """Wait until every rank is here, through the store: a rank alone in a collective gets only its backend's words."""
    if context.is_initialized():
        rows = None if isinstance(loader.dataset, IterableDataset) else len(loader.dataset)
        agree("evaluate", {"metrics": list(chosen), "rows": rows})


def forward_tuple(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Apply the model to all parts of a batch but the last, which is the target."""
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise ConfigError(
            f"Asked to evaluate on batches of type {type(batch).__name__}, but only (input, ..., target) is "
            "understood. Pass forward=lambda model, batch: (output, target)."
        )
    return model(*batch[:-1]), batch[-1]


def read_metrics(
    metrics: Iterable[str | Metric] | Mapping[str, str | Metric], loss_fn: Metric | None
) -> dict[str, Metric]:
    """Return the functions behind the metrics, by name; see `evaluate`."""
    named: Mapping[str, str | Metric]
    if isinstance(metrics, Mapping):
        named = metrics
    else:
        listed = [metrics] if isinstance(metrics, str) else list(metrics)
        named = {m if isinstance(m, str) else getattr(m, "__name__", repr(m)): m for m in listed}
    chosen = {name: _by_name(m, loss_fn) if isinstance(m, str) else m for name, m in named.items()}
    if loss_fn is not None:
        chosen.setdefault("loss", loss_fn)
    return chosen


def _by_name(name: str, loss_fn: Metric | None) -> Metric:
    if name == "loss":
        if loss_fn is None:
            raise ConfigError("Asked for the metric 'loss' without loss_fn. Pass loss_fn=.")
        return loss_fn
    top = re.fullmatch(r"acc([1-9]\d*)", name)
    if top is None:
        raise ConfigError(
            f"Asked for the metric {name!r}; 'loss' and 'acc1', 'acc5', ... are known by name."
            f"{did_you_mean(name, ['loss', 'acc1'])} Or pass a function of (output, target)."
        )
    k = int(top[1])
    return lambda out, target: topk_correct(out, target, k)


def row_sum(name: str, value: Any, loaded: int, counted: int) -> Tensor:
    """Return the sum of a metric over the rows of a batch that count: int64 if it is whole, float64 otherwise.

    Args:
        name: The metric's, for messages.
        value: One value per row, shape (loaded,) or (loaded, 1), or their mean, no dimensions.
        loaded: Rows of the batch.
        counted: How many of them count: all or none.
    """
    if not isinstance(value, Tensor) or value.shape not in ((), (loaded,), (loaded, 1)):
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"Metric {name!r} returned {found} for {loaded} rows. "
            "Return one value per row, or their mean without dimensions, as a tensor."
        )
    exact = value.double() if value.is_floating_point() or value.ndim == 0 else value.long()
    total = exact * loaded if value.ndim == 0 else exact.sum()
    # A padded row may hold anything, so it is replaced rather than multiplied: 0 * inf is not 0.
    return total if counted else torch.zeros_like(total)


def _loader(data: Any, batch_size: int | None) -> ShardedLoader:
    if isinstance(data, ShardedLoader):
        if data.training or data.drops_last:
            raise ConfigError(
                "Asked to evaluate on a ShardedLoader that trains or drops rows. "
                "Pass the dataset, or make the loader with training=False and drop_last=False."
            )
        return data
    if batch_size is None and not isinstance(data, torch.utils.data.DataLoader):
        batch_size = 64
    return ShardedLoader(data, batch_size=batch_size, drop_last=False, training=False)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; put each module back into its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def _with_progress(loader: ShardedLoader) -> Iterator[Any]:
    """Yield the loader's batches, and say how far it is when it takes long."""
    is_first = not context.is_initialized() or context.current().rank == 0
    steps = f" of {len(loader)}" if inspect.getattr_static(loader.dataset, "__len__", None) else ""
    said = time.monotonic()
    for done, batch in enumerate(loader):
        if is_first and time.monotonic() - said > PROGRESS_EVERY_S:
            said = time.monotonic()
            logger.info("Evaluating: %d%s batches done", done, steps)
        yield batch


def _means(totals: dict[str, Tensor], count: int, chosen: Mapping[str, Metric]) -> dict[str, float]:
    device = context.current().device if context.is_initialized() else torch.device("cpu")
    rows = int(sum_over_ranks(torch.tensor(count, device=device)))
    if rows == 0:
        raise ConfigError("Asked to evaluate on data without rows. Check the dataset.")
    return {name: float(sum_over_ranks(totals[name].to(device)).double() / rows) for name in chosen}
