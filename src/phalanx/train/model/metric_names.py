"""Resolve the metrics passed to `px.evaluate`: names, functions, objects, torchmetrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from torch import Tensor

from phalanx.errors import ConfigError, did_you_mean
from phalanx.train.loss.model_loss import ModelLossMetric, loss_of
from phalanx.train.metrics.accuracy import topk_correct
from phalanx.train.metrics.auc import AUC
from phalanx.train.metrics.base import GlobalMetric, SampleMean
from phalanx.train.metrics.classification import AVERAGES, F1, Average, ConfusionMatrix, Precision, Recall
from phalanx.train.metrics.regression import MAE, MSE, R2, RMSE
from phalanx.train.metrics.torchmetrics import TorchMetric, is_torch_metric

RowMetric = Callable[[Any, Any], Tensor]
"""From (output, target) to one value per sample, shape (N,), or to the mean over the samples, no dimensions."""

Metric = RowMetric | GlobalMetric
"""What `px.evaluate` computes: a function, or an object with reset, update and compute, of torchmetrics too."""

_NAMED: dict[str, Callable[[], GlobalMetric]] = {
    "auc": AUC,
    "confusion": ConfusionMatrix,
    "mae": MAE,
    "mse": MSE,
    "r2": R2,
    "rmse": RMSE,
    **(_AVERAGED := {"f1": F1, "precision": Precision, "recall": Recall}),
}


def read_metrics(
    metrics: Iterable[str | Metric] | Mapping[str, str | Metric] | str | Metric, loss_fn: RowMetric | None
) -> dict[str, GlobalMetric]:
    """Return the metrics by name, without samples; see `px.evaluate`.

    Raises:
        ConfigError: If one is unknown or is no metric.
    """
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    else:
        is_several = isinstance(metrics, Iterable) and not isinstance(metrics, str) and not is_torch_metric(metrics)
        listed: list[Any] = list(cast("Iterable[Any]", metrics)) if is_several else [metrics]
        named = {}
        for metric in listed:
            name = metric if isinstance(metric, str) else _name_of(metric)
            if name in named:
                raise ConfigError(f"Asked for two metrics called {name!r}. Name them: metrics={{'name': metric, ...}}.")
            named[name] = metric
    chosen = {name: _build_metric(name, metric, loss_fn) for name, metric in named.items()}
    if loss_fn is not None and "loss" not in chosen:
        chosen["loss"] = _loss(loss_fn)
    for global_metric in chosen.values():
        global_metric.reset()
    return chosen


def takes_loss(metric: GlobalMetric, loss_fn: RowMetric | None) -> bool:
    """Return whether a metric is the loss itself, which is given outputs as the model leaves them."""
    return isinstance(metric, ModelLossMetric) or (isinstance(metric, SampleMean) and metric.sample_fn is loss_fn)


def _loss(loss_fn: RowMetric | None) -> SampleMean:
    return ModelLossMetric() if loss_fn is None or loss_fn is loss_of else SampleMean("loss", loss_fn)


def _name_of(metric: Any) -> str:
    return getattr(metric, "__name__", None) or type(metric).__name__


def _build_metric(name: str, metric: Any, loss_fn: RowMetric | None) -> GlobalMetric:
    if isinstance(metric, str):
        return _by_name(metric, loss_fn)
    if isinstance(metric, type):
        raise ConfigError(f"Asked for the metric {name!r}, which is a class. Make one: {name}().")
    if is_torch_metric(metric):
        return TorchMetric(metric)
    if isinstance(metric, GlobalMetric):
        return metric
    if callable(metric):
        return SampleMean(name, metric)
    raise ConfigError(
        f"Asked for the metric {name!r}, found {type(metric).__name__}. Give a name, a function of (output, target), "
        "or an object with reset, update and compute."
    )


def _by_name(name: str, loss_fn: RowMetric | None) -> GlobalMetric:
    if name == "loss":
        return _loss(loss_fn)
    if top := re.fullmatch(r"acc([1-9]\d*)", name):
        k = int(top[1])
        return SampleMean(name, lambda out, target: topk_correct(out, target, k))
    kind, _, average = name.partition("_")
    if kind in _AVERAGED and average in AVERAGES:
        return _AVERAGED[kind](cast("Average", average))
    if name in _NAMED:
        return _NAMED[name]()
    names = [
        "loss",
        "acc1",
        *sorted(_NAMED),
        *(f"{kind}_{average}" for kind in _AVERAGED for average in AVERAGES),
    ]
    hint = " Did you mean 'acc1'?" if name.lower() == "accuracy" else did_you_mean(name, names)
    raise ConfigError(
        f"Asked for the metric {name!r}; known by name are 'loss', 'acc1', 'acc5', ..., "
        f"{', '.join(map(repr, sorted(_NAMED)))}.{hint} Or pass a function of (output, target)."
    )
