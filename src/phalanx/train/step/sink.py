"""`train_epoch`: sink mode: N steps per host synchronisation (Keras' steps_per_execution), and the epoch loop.

Inside a sink nothing on the host waits for a value of the device, and callbacks that want to see one act at its end.
The steps are those of a loop without sinks, in the same order, with the same losses. On one CUDA device forward and
backward pass are captured as a graph (`cuda_graph`), which costs one launch a step.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from phalanx.accelerator import can_capture_graphs
from phalanx.comm.context import Context
from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import ConfigError
from phalanx.parallel.model_shape import is_handle
from phalanx.parallel.session import applied_to
from phalanx.train.callbacks.run import Run

logger = logging.getLogger("phalanx.train")


def steps_in_sink(is_on: bool, sink_size: int, loader: ShardedLoader) -> int:
    """Return the steps of a sink: 1 without sinks, those of an epoch for -1.

    Args:
        is_on: Whether `dataset_sink_mode` was requested.
        sink_size: -1, or the steps asked for.
        loader: The data.

    Raises:
        ConfigError: If the size is no number of steps, or was given without sink mode.
    """
    if isinstance(sink_size, bool) or not isinstance(sink_size, int) or (sink_size < 1 and sink_size != -1):
        raise ConfigError(f"sink_size is a number of steps, or -1 for a whole epoch; found {sink_size!r}.")
    if not is_on:
        if sink_size != -1:
            raise ConfigError(f"sink_size={sink_size} needs dataset_sink_mode=True. Set it, or leave sink_size out.")
        return 1
    if sink_size != -1:
        return sink_size
    try:
        return max(loader.steps_per_epoch, 1)
    except TypeError:  # a stream without a length: the sink ends with the epoch
        return sys.maxsize


def check_sinkable(model: nn.Module) -> None:
    """Raise if a model's step cannot be captured, on any device: the same script then runs on every device.

    Raises:
        ConfigError: Names the first module that needs the host in every step.
    """
    for name, what in _needing_host(model):
        raise ConfigError(f"dataset_sink_mode cannot sink {name!r}: {what}. Train with dataset_sink_mode=False.")


def _needing_host(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if any(is_handle(param) for param in module.parameters(recurse=False)):
            yield name, f"{kind} pulls the rows of the ids in each batch, as many as there are, on the host"
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield name, f"the gradient of {kind}(sparse=True) has as many rows as the batch has ids"


def can_capture(model: nn.Module, current: Context, *, compiled: bool) -> bool:
    """Return whether forward and backward pass of a sink may be captured as a CUDA graph; says why not, once.

    Args:
        model: A distributed model.
        current: This process.
        compiled: Whether the step is compiled.
    """
    applied = applied_to(model)
    assert applied is not None
    step: Any = applied.plan.step
    against = {
        "the device is no CUDA card": not can_capture_graphs(current.device),
        "gradients of several ranks meet in the backward pass": current.is_distributed,
        "the step is compiled": compiled,
        "gradient_merge adds up several batches": step.accumulate > 1,
        "float16 changes the scale of the loss": step.scaler is not None,
        "activations are computed again or kept on the host": any(
            rule.recompute != "none" or rule.offload for rule in applied.plan.modules
        ),
    }
    why = next((reason for reason, is_so in against.items() if is_so), None)
    if why is not None and can_capture_graphs(current.device) and current.rank == 0:
        logger.info("dataset_sink_mode launches steps one by one, without a CUDA graph: %s", why)
    return why is None


def train_epoch(run: Run, steps_in_sink: int, one_step: Callable[[Any], bool]) -> bool:
    """Train on the batches that are left of an epoch; return whether training stops inside it. Collective.

    Args:
        run: Where training is.
        steps_in_sink: Updates from one look of the host to the next; the last sink of an epoch may be shorter.
        one_step: Trains on one batch; returns whether the parameters were updated.

    Raises:
        ConfigError: If there is no batch.
    """
    waiting = 0
    for batch in run.loader:
        waiting += one_step(batch)
        # Inside the loop where the length is known, so that what is saved there belongs to this epoch.
        if waiting >= steps_in_sink or (waiting and run.batches == run.steps_per_epoch):
            waiting = 0
            if run.end_step():
                return True
    if not run.batches:
        raise ConfigError("The training data has no batch. Check the dataset, its batch size and drop_last.")
    return bool(waiting) and run.end_step()
