"""What this process has handed over, and eyes on loops nobody means, such as steps over one rank's own gradients."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import phalanx.comm.context as context_of
from phalanx.comm import process_group
from phalanx.data.loader import ShardedLoader
from phalanx.data.stream import digest
from phalanx.errors import ConfigError
from phalanx.parallel.apply import applied, is_cared_for, name_of
from phalanx.strategy import DistributedStrategy

logger = logging.getLogger("phalanx.parallel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a script is about to train."""

    model: nn.Module
    optimizer: Optimizer | None = None
    strategy: DistributedStrategy | None = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    has_target: bool | None = None
    """Whether a column of the data is its target; None where a loop of the script's own decides."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What it called the model with, where nobody handed over the data."""


@dataclass(slots=True)
class Assembly:
    """What has been handed over so far in this process; Fleet's verbs bring the pieces one by one, in any order."""

    strategy: DistributedStrategy | None = None
    initial: DistributedStrategy | None = None
    """What `fleet.init` was given: that of models for which nobody says another."""

    optimizers: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    incomplete: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    """Models whose optimizer should come by a call of its own."""

    loader: ShardedLoader | None = None
    planner: Callable[[Training], NoReturn] | None = None
    """In a run that only plans, called in place of training."""

    has_warned: bool = False
    has_compared: bool = False


ACTS_AT_UPDATES = frozenset(("lars", "lamb", "clip", "ema", "gradient_merge", "localsgd", "adaptive_localsgd", "dgc"))
"""Techniques of a strategy that do nothing, or not all they should, to an optimizer that was never handed over."""

assembly = Assembly()
"""This process's own."""


def is_anything_handed_over() -> bool:
    """Return whether this process distributed a model or an optimizer."""
    return bool(applied() or assembly.optimizers)


def warn_if_apart(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Warn when a model came by `distributed_model`, but this optimizer, or any if None, by no such call."""
    optimizers = assembly.optimizers
    if model in assembly.incomplete and not (optimizers if optimizer is None else optimizer in optimizers):
        on = sorted(ACTS_AT_UPDATES.intersection(assembly.strategy.techniques)) if assembly.strategy else []
        logger.warning(
            "the model is distributed but no optimizer is%s. Call fleet.distributed_optimizer(optimizer) too.",
            f", so {', '.join(on)} cannot act" if on else "",
        )


def is_trained_by(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether an optimizer holds a parameter of a model."""
    own = {id(param) for param in model.parameters()}
    return any(id(param) in own for group in optimizer.param_groups for param in group["params"])


def reach_at_call(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """In a run that only plans, end a script at the first training call of a model whose data nobody handed over.

    A call without gradients trains nothing, in training mode too.
    """
    if assembly.planner is not None and model.training and torch.is_grad_enabled():
        optimizer = next((one for one in assembly.optimizers if is_trained_by(model, one)), None)
        training = Training(model=model, optimizer=optimizer, strategy=assembly.strategy, inputs=(inputs, named))
        assembly.planner(training)


class StepWatch:
    """Stops an optimizer step whose gradients are not those of all ranks."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._apart: list[Tensor] = []

    def __call__(self, optimizer: Optimizer) -> None:
        """Look at the gradients that the optimizer is about to use."""
        if not context_of.current().is_distributed:
            return
        made = applied()
        if any(a.reducer is not None and a.reducer.is_reducing for a in made):
            raise ConfigError("the last backward pass raised an error, so the gradients are incomplete. End the job.")
        seen = len(made), sum(len(group["params"]) for group in optimizer.param_groups)
        if seen != self._seen:
            self._seen = seen
            self._apart = [p for group in optimizer.param_groups for p in group["params"] if not is_cared_for(p)]
        late = [p for p in self._apart if p.grad is not None]
        if late and made:
            raise ConfigError(_explain_apart(late))
        if late and not assembly.has_warned:
            assembly.has_warned = True
            logger.warning(
                "the optimizer is distributed but no model is: gradients are not averaged. Call "
                "fleet.distributed_model(model) too."
            )


def _explain_apart(late: list[Tensor]) -> str:
    name = name_of(late[0])
    which = f"parameter {name!r}" if name else f"a parameter of shape {tuple(late[0].shape)}"
    others = f" (and those of {len(late) - 1} others)" if len(late) > 1 else ""
    why = (
        "It was frozen, or another tensor stood in its place, when the model was distributed: set requires_grad and "
        "load with assign=True before that"
        if name
        else "It belongs to no distributed model: distribute one module that holds all you train"
    )
    return f"the gradient of {which}{others} is not averaged over the ranks. {why}."


class ForwardWatch:
    """Warns once about loops nobody means: evaluation that keeps graphs, training without a distributed optimizer."""

    PATIENCE = 3
    """Forward passes before a warning; the first may be a probe."""

    def __init__(self) -> None:
        self.evaluations = 0
        self.training_steps = 0
        self._watch_rows = RowsWatch()

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Count a forward pass."""
        # A compiler that traces the model must not see the counters: it would compile anew for each value.
        if torch.compiler.is_compiling() or not isinstance(output, Tensor) or not output.requires_grad:
            return
        if model.training:
            self.training_steps += 1
            self._watch_rows((*inputs, *named.values()))
            if self.training_steps == self.PATIENCE:
                warn_if_apart(model)
            return
        self.evaluations += 1
        if self.evaluations == self.PATIENCE:
            logger.warning(
                "the model is in eval() mode but still builds a graph for backward, which keeps memory. "
                "Wrap evaluation in torch.no_grad(), or use phalanx.evaluate."
            )


class RowsWatch:
    """Warns once when rank 1 trains on the rows of rank 0: their loader was never told that there are two.

    Seen where it shows, in what comes into the model: a loader that shards by itself gives every rank other rows. Only
    under our launcher, and nobody waits: rank 1 leaves a checksum in the store, rank 0 looks for it.
    """

    LOOKED_AT = (2, 3)
    """Forward passes that are compared; the first may be a probe."""

    PATIENCE = 20
    """Forward passes until rank 0 no longer looks for what rank 1 found."""

    def __init__(self) -> None:
        self._passes = 0
        self._found: list[int] = []
        self._number = len(applied())

    def __call__(self, inputs: tuple[Any, ...]) -> None:
        """Look at the inputs of a forward pass in training."""
        self._passes += 1
        if not self.LOOKED_AT[0] <= self._passes <= self.PATIENCE or assembly.has_compared or not self._is_asked():
            return
        if self._passes in self.LOOKED_AT:
            tensors = [x for x in inputs if type(x) is Tensor and x.layout is torch.strided]
            self._found += [digest(tensors)] if tensors else []
        if len(self._found) == len(self.LOOKED_AT):
            self._compare(",".join(map(str, self._found)))

    def _is_asked(self) -> bool:
        """Return whether this is rank 0 or 1 of a job of ours, and no loader of ours said which rows it has."""
        here = context_of.current()
        is_ours = here.role.launcher == "phalanx" and dist.is_initialized()
        has_own_rows = here.is_distributed and here.readers.count == here.world_size
        return is_ours and has_own_rows and here.rank <= 1 and here.batch is None

    def _compare(self, mine: str) -> None:
        store, key = process_group.meeting().store, f"rows seen by rank 1/{self._number}"
        if context_of.current().rank == 1:
            assembly.has_compared = True
            store.set(key, mine)
        elif store.has([key]):
            assembly.has_compared = True
            if store.get(key) == mine:
                logger.warning(
                    "ranks 0 and 1 train on the same rows: the loader is not shared out over the ranks. Give it to "
                    "px.distribute(model, optimizer, loader), or a torch DistributedSampler to the DataLoader."
                )
