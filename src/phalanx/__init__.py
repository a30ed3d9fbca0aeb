"""Phalanx: one PyTorch training script, from a laptop to a cluster.

Importing this package is cheap: torch is loaded when a name that needs it is first touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError
from phalanx.old_names import answer_imports, missing

if TYPE_CHECKING:  # names resolved by __getattr__ below, for type checkers and editors
    from phalanx import checkpoint, comm, data, fleet, ps
    from phalanx.auto.predict.prediction import predict
    from phalanx.auto.simulate_plan import simulate_plan
    from phalanx.checkpoint.checkpointer import Checkpointer
    from phalanx.checkpoint.export.export import export_onnx, export_program, export_state_dict
    from phalanx.checkpoint.loading import load
    from phalanx.checkpoint.saving import save
    from phalanx.comm.context import Context, current, init, shutdown, use_batch
    from phalanx.launch.from_function import launch
    from phalanx.parallel.apply import apply
    from phalanx.parallel.data.weighted_mean import weighted_mean
    from phalanx.parallel.distribute import DataParallel, no_sync
    from phalanx.parallel.explain import explain
    from phalanx.parallel.optim.clip import clip_grad_norm_
    from phalanx.parallel.optim.ema import EMA, ema_of
    from phalanx.parallel.step.gate import follow_updates, has_updated
    from phalanx.parallel.tensor.layers.gathered_linear import ModelParallelLinear
    from phalanx.parallel.tensor.layers.vocab import vocab_cross_entropy
    from phalanx.parallel.tensor.shard_api import shard
    from phalanx.plan.value import Plan
    from phalanx.strategy import DistributedStrategy
    from phalanx.train.auto_parallel import auto_parallel
    from phalanx.train.callbacks.base import Callback
    from phalanx.train.callbacks.checkpoint import ModelCheckpoint
    from phalanx.train.callbacks.early_stopping import EarlyStopping
    from phalanx.train.callbacks.ema import EMACallback
    from phalanx.train.callbacks.loggers import CSVLogger, JSONLogger, TensorBoard
    from phalanx.train.callbacks.monitors import LossMonitor, TimeMonitor
    from phalanx.train.callbacks.progress import ProgressBar
    from phalanx.train.callbacks.schedule import LearningRateSchedule
    from phalanx.train.distribute import distribute
    from phalanx.train.events import report
    from phalanx.train.loss.expanded_loss import SoftmaxCrossEntropyExpand
    from phalanx.train.metrics.accuracy import accuracy, correct_at
    from phalanx.train.metrics.auc import AUC
    from phalanx.train.metrics.base import global_mean
    from phalanx.train.metrics.classification import F1, ConfusionMatrix, Precision, Recall
    from phalanx.train.metrics.regression import MAE, MSE, R2, RMSE
    from phalanx.train.model.auto_context import (
        get_auto_parallel_context,
        reset_auto_parallel_context,
        set_auto_parallel_context,
    )
    from phalanx.train.model.evaluate import evaluate
    from phalanx.train.model.model import Model
    from phalanx.train.model.modes import ParallelMode
    from phalanx.train.step.step import train_step

answer_imports()

__version__ = "0.2.0"

_HOMES = {
    "AUC": "phalanx.train.metrics.auc",
    "ConfusionMatrix": "phalanx.train.metrics.classification",
    "F1": "phalanx.train.metrics.classification",
    "MAE": "phalanx.train.metrics.regression",
    "MSE": "phalanx.train.metrics.regression",
    "Precision": "phalanx.train.metrics.classification",
    "R2": "phalanx.train.metrics.regression",
    "RMSE": "phalanx.train.metrics.regression",
    "Recall": "phalanx.train.metrics.classification",
    "CSVLogger": "phalanx.train.callbacks.loggers",
    "Callback": "phalanx.train.callbacks.base",
    "Checkpointer": "phalanx.checkpoint.checkpointer",
    "Context": "phalanx.comm.context",
    "DataParallel": "phalanx.parallel.distribute",
    "DistributedStrategy": "phalanx.strategy",
    "Model": "phalanx.train.model.model",
    "ModelParallelLinear": "phalanx.parallel.tensor.layers.gathered_linear",
    "EMACallback": "phalanx.train.callbacks.ema",
    "EarlyStopping": "phalanx.train.callbacks.early_stopping",
    "JSONLogger": "phalanx.train.callbacks.loggers",
    "LearningRateSchedule": "phalanx.train.callbacks.schedule",
    "LossMonitor": "phalanx.train.callbacks.monitors",
    "ModelCheckpoint": "phalanx.train.callbacks.checkpoint",
    "ProgressBar": "phalanx.train.callbacks.progress",
    "TensorBoard": "phalanx.train.callbacks.loggers",
    "TimeMonitor": "phalanx.train.callbacks.monitors",
    "EMA": "phalanx.parallel.optim.ema",
    "ParallelMode": "phalanx.train.model.modes",
    "Plan": "phalanx.plan.value",
    "SoftmaxCrossEntropyExpand": "phalanx.train.loss.expanded_loss",
    "accuracy": "phalanx.train.metrics.accuracy",
    "apply": "phalanx.parallel.apply",
    "clip_grad_norm_": "phalanx.parallel.optim.clip",
    "current": "phalanx.comm.context",
    "distribute": "phalanx.train.distribute",
    "auto_parallel": "phalanx.train.auto_parallel",
    "correct_at": "phalanx.train.metrics.accuracy",
    "ema_of": "phalanx.parallel.optim.ema",
    "evaluate": "phalanx.train.model.evaluate",
    "explain": "phalanx.parallel.explain",
    "follow_updates": "phalanx.parallel.step.gate",
    "has_updated": "phalanx.parallel.step.gate",
    "get_auto_parallel_context": "phalanx.train.model.auto_context",
    "export_onnx": "phalanx.checkpoint.export.export",
    "export_program": "phalanx.checkpoint.export.export",
    "export_state_dict": "phalanx.checkpoint.export.export",
    "global_mean": "phalanx.train.metrics.base",
    "init": "phalanx.comm.context",
    "load": "phalanx.checkpoint.loading",
    "no_sync": "phalanx.parallel.distribute",
    "predict": "phalanx.auto.predict.prediction",
    "report": "phalanx.train.events",
    "reset_auto_parallel_context": "phalanx.train.model.auto_context",
    "save": "phalanx.checkpoint.saving",
    "set_auto_parallel_context": "phalanx.train.model.auto_context",
    "shard": "phalanx.parallel.tensor.shard_api",
    "simulate_plan": "phalanx.auto.simulate_plan",
    "shutdown": "phalanx.comm.context",
    "train_step": "phalanx.train.step.step",
    "use_batch": "phalanx.comm.context",
    "weighted_mean": "phalanx.parallel.data.weighted_mean",
    "vocab_cross_entropy": "phalanx.parallel.tensor.layers.vocab",
}
_MODULES = ("checkpoint", "cluster", "comm", "data", "distributed", "fleet", "launch", "plan", "ps")
_TORCH_FREE = {"DistributedStrategy", "Plan", "cluster", "plan", "predict"}

__all__ = ["PhalanxError", "__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _MODULES:
        raise missing("phalanx", name, __all__)
    if name not in _TORCH_FREE:
        from phalanx.versions import require_torch

        require_torch()
    if name in _MODULES:
        return importlib.import_module(f"phalanx.{name}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
