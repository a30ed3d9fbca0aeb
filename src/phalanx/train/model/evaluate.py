"""`px.evaluate`: metrics over all samples of a dataset, independent of the number of ranks."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from phalanx.comm import context
from phalanx.comm.agreement import agree
from phalanx.data.loader.binding import call
from phalanx.data.loader.loader import ShardedLoader
from phalanx.data.pipeline.pipeline import Pipeline
from phalanx.errors import ConfigError
from phalanx.parallel.checks.consistency import as_saved, make_consistent
from phalanx.parallel.tensor.mappings import gather_from
from phalanx.parallel.tensor.shard_spec import ShardSpec
from phalanx.train.loss.batch_reader import BatchReader, columns_of, explain_dtype_errors
from phalanx.train.loss.expanded_loss import logits_spec
from phalanx.train.loss.model_loss import ModelLossMetric, logits_of, loss_of, on_logits
from phalanx.train.metrics.base import AllRanks, GlobalMetric
from phalanx.train.metrics.torchmetrics import TorchMetric
from phalanx.train.model.metric_names import Metric, RowMetric, read_metrics, takes_loss

logger = logging.getLogger("phalanx.train")

PROGRESS_EVERY_S = 10.0
"""Seconds between two lines of progress."""


def evaluate(
    model: nn.Module,
    data: Any,
    metrics: Iterable[str | Metric] | Mapping[str, str | Metric] | str | Metric = ("acc1",),
    *,
    loss_fn: RowMetric | None = None,
    batch_size: int | None = None,
    forward: Callable[[nn.Module, Any], tuple[Tensor, Any]] | None = None,
) -> dict[str, Any]:
    """Return each metric over all samples of `data`.

    Collective: every rank must call it. Each sample counts once, on one rank, and is added up without rounding, so from
    the same outputs N ranks give the result of one process to the last bit. Runs without gradients and in evaluation
    mode; afterwards each module is in the mode it was in. Buffers are synchronised first, and parameters compared over
    the ranks; where ranks take local steps (LocalSGD), the average is evaluated, as `px.save` holds it. Where ranks
    hold slices of the outputs (logits sharded by classes), the whole is gathered for metrics; `loss_fn` gets what the
    model gives.

    Args:
        model: The model, wrapped or not.
        data: Anything `ShardedLoader` takes. Every sample is used, also where a DataLoader says drop_last, and once,
            whatever a pipeline repeats. A batch is (input, ..., target) or a dictionary, as `px.Model` takes it.
        metrics: Names: `acc<k>` for the top-k accuracy, `loss`, `auc`, `confusion`, `precision`, `recall`, `f1` (also
            `f1_macro` and so on), `mae`, `mse`, `rmse`, `r2`. Functions of (output, target), one value a sample, of
            which the result is the mean. Objects, such as `px.F1("macro")`, of torchmetrics, or of yours with reset,
            update and compute. A mapping names them itself.
        loss_fn: What `loss` means; added under that name when given. A mean over the batch, or one value a sample. When
            None, `loss` is the one that the model returns of targets among its inputs. Torch's own, and all other
            metrics, get the `logits` of an output that has some, such as a ModelOutput.
        batch_size: Samples per rank; a DataLoader's or pipeline's own, or 64 when omitted.
        forward: From (model, batch) to (output, target), for batches other than (input, ..., target).

    Returns:
        By name, floats; what an object computes, otherwise (a `Confusion`, say).

    Raises:
        ConfigError: If a metric is unknown, a batch has another shape, or a metric returns something else. On all
            ranks, if they ask for different metrics, hold different numbers of samples or other parameters, or are at
            different calls.
        PeerLostError: If a rank has ended, or did not call it within 300 s; names it.
    """
    recovery = context.current().recovery if context.is_initialized() else None
    evaluation = partial(_evaluate, model, data, metrics, loss_fn, batch_size, forward)
    return evaluation() if recovery is None else recovery.repeat(evaluation)


def _evaluate(
    model: nn.Module,
    data: Any,
    metrics: Iterable[str | Metric] | Mapping[str, str | Metric] | str | Metric,
    loss_fn: RowMetric | None,
    batch_size: int | None,
    forward: Callable[[nn.Module, Any], tuple[Tensor, Any]] | None,
) -> dict[str, Any]:
    loss_fn = None if loss_fn is None else on_logits(loss_fn)
    chosen = read_metrics(metrics, loss_fn)
    loader = evaluation_loader(data, batch_size)
    read = _reader(model, chosen, is_own=loss_fn is None or loss_fn is loss_of)
    _meet(chosen, loader)
    spec = logits_spec(model)
    rows = 0
    make_consistent(model, "px.evaluate")
    with evaluation_mode(model), torch.no_grad():
        for batch in _with_progress(loader):
            assert loader.share is not None
            columns = columns_of(batch, loader.columns)
            with explain_dtype_errors(model, columns):
                if forward is not None:
                    out, target = forward(model, batch)
                else:
                    inputs, target = read(batch, loader.columns)
                    out = call(model, inputs)
            full = logits_of(out) if spec is None else gather_output(logits_of(out), spec)
            # A padded sample may hold anything, and counts on another rank.
            if loader.share.rows:
                rows += loader.share.rows
                for metric in chosen.values():
                    # A net that returns its loss may be the only one to know its target; samples are counted then.
                    counted_target = columns if target is None and isinstance(metric, ModelLossMetric) else target
                    metric.update(out if takes_loss(metric, loss_fn) else full, counted_target)
    ranks = AllRanks()
    if int(ranks.sum(torch.tensor(rows))) == 0:
        raise ConfigError("Asked to evaluate on data without rows. Check the dataset.")
    results: dict[str, Any] = {}
    for name, metric in chosen.items():
        value = metric.compute(ranks)
        # A collection of torchmetrics names its own.
        results |= value if isinstance(metric, TorchMetric) and isinstance(value, dict) else {name: value}
    return results


def gather_output(out: Any, spec: ShardSpec) -> Any:
    """Return outputs of which this rank holds a slice of the classes, gathered. Collective along the cut."""
    if isinstance(out, Mapping) and "logits" in out:
        return {**out, "logits": gather_output(out["logits"], spec)}
    if isinstance(out, Tensor) and out.shape[-1] == spec.mine != sum(spec.sizes):
        return gather_from(out, out.ndim - 1, spec)
    return out


def _meet(chosen: Mapping[str, GlobalMetric], loader: ShardedLoader) -> None:
    """Wait until every rank is here, through the store: a rank alone in a collective gets only its backend's words."""
    if context.is_initialized():
        rows = None if isinstance(loader.dataset, IterableDataset) else len(loader.dataset)
        agree("evaluate", {"metrics": list(chosen), "rows": rows, "seed": loader.seed})


def _reader(model: nn.Module, chosen: Mapping[str, GlobalMetric], *, is_own: bool) -> BatchReader:
    """Return what reads batches for metrics, of which one may be the loss that the model returns itself."""
    needs_target = not all(isinstance(metric, ModelLossMetric) for metric in chosen.values())
    if not is_own:
        return BatchReader(model, target="apart")
    has_loss = any(isinstance(metric, ModelLossMetric) for metric in chosen.values())
    return BatchReader(model, target="if taken" if has_loss else "if needed", needs_target=needs_target)


def evaluation_loader(
    data: Any, batch_size: int | None, verb: str = "evaluate", *, shuffle: bool | None = None
) -> ShardedLoader:
    """Return a loader of all samples of some data, once; see `evaluate`.

    Args:
        data: Anything `ShardedLoader` takes.
        batch_size: Samples per rank; the data's own, or 64 when None.
        verb: What is done with them, for messages.
        shuffle: False for the order of the data.

    Raises:
        ConfigError: If it cannot be loaded, or is a loader that trains or drops samples.
    """
    if isinstance(data, ShardedLoader):
        if data.training or data.drops_last:
            raise ConfigError(
                f"Asked to {verb} on a ShardedLoader that trains or drops rows. "
                "Pass the dataset, or make the loader with training=False and drop_last=False."
            )
        return data
    if isinstance(data, Pipeline):
        data = data.one_pass()
    if batch_size is None and not isinstance(data, torch.utils.data.DataLoader) and not getattr(data, "is_batched", 0):
        batch_size = 64
    return ShardedLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=False, training=False)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, with the weights of a save; put weights and each module's mode back afterwards.

    Collective where ranks take local steps (LocalSGD).
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with as_saved(model):
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def _with_progress(loader: ShardedLoader) -> Iterator[Any]:
    """Yield the loader's batches, and say how far it is when it takes long."""
    is_first = not context.is_initialized() or context.current().rank == 0
    steps = f" of {len(loader)}" if inspect.getattr_static(loader.dataset, "__len__", None) else ""
    logged_at = time.monotonic()
    for count, batch in enumerate(loader):
        if is_first and time.monotonic() - logged_at > PROGRESS_EVERY_S:
            logged_at = time.monotonic()
            logger.info("Evaluating: %d%s batches done", count, steps)
        yield batch
