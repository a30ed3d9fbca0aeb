"""`ReplicaComparison`: detect desync by comparing checksums of replicated parameters every few steps.

In the first steps, then at longer intervals up to a few hundred steps, and whenever they meet to evaluate or save.
Looked at after the exchange of gradients, which every rank comes to equally often, whatever optimizer follows and
whether or not it was handed over. A loop may have changed parameters for the moment there (sharpness-aware steps), so a
difference counts once an `optimizer.step()` or the next exchange finds it too.

Left out: parameters that live on servers, which workers hold at different ages; those that ranks train apart (LocalSGD)
between two averages; slices, where no other rank holds the same one; and buffers, which are made equal instead.
"""

from __future__ import annotations

import logging
import os
import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.comm.elastic import membership
from phalanx.errors import ConfigError
from phalanx.parallel.checks.compare import ReplicatedTensors, broadcast_first, difference, may_differ
from phalanx.parallel.model_shape import is_handle, is_module_held
from phalanx.parallel.session import StepPhase
from phalanx.parallel.step.hooks import add_action
from phalanx.parallel.step.norms import local_part
from phalanx.plan.mesh import partition, sharded_along
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.value import Average, ParamRule, Plan, Push, ReduceScatter

logger = logging.getLogger("phalanx.parallel")

VARIABLE = "PHALANX_COMPARE_EVERY"

_EVERY = 500


def compare_every() -> int:
    """Return after how many steps parameters are compared again; 0 to compare none, at any time.

    Raises:
        ConfigError: If the variable is no such number.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return _EVERY
    if not text.isdecimal():
        raise ConfigError(f"{VARIABLE} must be a number of steps, 0 for never, found {text!r}. Correct it.")
    return int(text)


class ReplicaComparison:
    """Compares the copies of one model's parameters.

    Args:
        plan: Says which ranks hold the same.
        model: The model, as it was made ready for training.
        every: Steps between two comparisons after the first ones.
        device: Where what travels lies.
    """

    def __init__(self, plan: Plan, model: nn.Module, every: int, device: torch.device) -> None:
        self._plan, self._every, self._device = plan, every, device
        self._model = weakref.ref(model)  # what was made of a model must not keep it alive
        self._has_sharded_updates = any(isinstance(rule.update, ReduceScatter) for rule in plan.params)
        self._has_sharded_layers = any(map(sharded_along, plan.params))
        alike = dict.fromkeys(self._copied_along(rule) for rule in (*plan.params, ParamRule(match="*")))
        self._classes = {axes: partition(plan.mesh, axes) for axes in alike if axes}
        self._steps = 0
        self._equal_at = 0
        self._is_suspected = False
        self._is_stepped = False
        self._has_warned = False

    @property
    def is_idle(self) -> bool:
        """Whether no rank holds a copy of what another holds."""
        return not self._classes

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing behind in a copy of a model that it is a hook of."""
        return partial, (_ignore,)

    def bind(self, optimizer: Optimizer, *, counts: bool) -> None:
        """Look again after a step of this optimizer where the exchange of gradients found a difference.

        Args:
            optimizer: Trains the model.
            counts: Whether nothing else tells the steps.
        """
        self._is_stepped = True
        add_action(optimizer, StepPhase.COMPARE_REPLICAS, lambda _: self.step() if counts else self._confirm())

    def exchanged(self) -> None:
        """Compare if it is time, after gradients were exchanged. Collective over all ranks of the job, as that is."""
        self._steps += 1
        if self._is_suspected:
            self._confirm()
        elif self._is_due() and may_differ(self._copies(), self._device):
            self._is_suspected = True
            if not self._is_stepped:
                self._confirm()
        elif self._is_due():
            self._equal_at = self._steps

    def step(self) -> None:
        """Count a step, and compare if it is time. Collective over all ranks of the job then."""
        self._steps += 1
        if self._is_due():
            self.compare(f"in step {self._steps}")

    def __call__(self, model: nn.Module, *_: object) -> None:
        """Do so before a forward pass in training, where the layers of all ranks meet."""
        if model is self._model() and model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.step()

    def compare(self, when: str, optimizer: Optimizer | None = None) -> None:
        """Compare now. Collective over all ranks of the job.

        Differences that rounding explains (hosts with other processors) are taken back, with a warning the first time.

        Args:
            when: For the message.
            optimizer: Its state is compared too: what has the shape of a parameter lies as that does.

        Raises:
            ConfigError: If copies differ; on all ranks.
        """
        self._is_suspected = False
        model, copies = self._model(), self._copies(optimizer)
        gap = difference(copies, self._device)
        if gap is None or model is None:
            self._equal_at = self._steps
            return
        if not gap.is_rounding:
            since = f"step {self._equal_at}" if self._equal_at else "the start"
            why = explain_desync(has_sharded_layers=self._has_sharded_layers, has_tables=bool(self._plan.tables))
            raise ConfigError(
                f"the ranks' parameters have come apart. {when[0].upper()}{when[1:]} these differ: {gap}; they were "
                f"equal at {since}. {why} Where it is meant, {VARIABLE}=0 compares none."
            )
        broadcast_first(copies)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s the ranks' parameters differ by what rounding explains: %s. All have those of the first rank now, "
                "and will from time to time. Ranks compute differently: look for other processors or numbers of "
                "threads, or a step that is not deterministic.",
                when,
                gap,
            )

    def _is_due(self) -> bool:
        """Return whether to compare now: in steps 2, 3, 4, 8, 16 and so on, and then every so many.

        In the first, mistakes of the script show; before the first update parameters are as they were handed out.
        """
        early = 1 < self._steps < self._every and (self._steps == 3 or self._steps.bit_count() == 1)
        return early or self._steps % self._every == 0

    def _confirm(self) -> None:
        if self._is_suspected:
            self.compare(f"after the exchange of gradients in step {self._steps}")

    def _copies(self, optimizer: Optimizer | None = None) -> list[ReplicatedTensors]:
        """Return this rank's copies, by the ranks that hold the same."""
        model, states = self._model(), {} if optimizer is None else optimizer.state
        copies: dict[tuple[str, ...], dict[str, Tensor]] = {axes: {} for axes in self._classes}
        with torch.no_grad():
            for name, param in () if model is None else model.named_parameters():
                axes = self._copied_along(self._plan.rule_for(name), param)
                if axes not in copies:
                    continue
                copies[axes][name] = local_part(param.detach())
                for key, value in states.get(param, {}).items():
                    if isinstance(value, Tensor) and value.shape == param.shape and type(value) is type(param.data):
                        copies[axes][f"{name} ({key})"] = local_part(value)
        return [ReplicatedTensors(rank_groups, copies[axes]) for axes, rank_groups in self._classes.items()]

    def _copied_along(self, rule: ParamRule, param: Tensor | None = None) -> tuple[str, ...]:
        """Return the axes along which ranks hold the same part of a parameter."""
        sharded = {STAGE_AXIS, *sharded_along(rule)}
        if isinstance(rule.update, Average | Push):
            return ()
        if param is not None and not comparable(param, is_shard=bool(sharded_along(rule))):
            return ()
        if self._has_sharded_updates:  # torch cuts those that are not trained too
            sharded |= {axis for other in self._plan.params for axis in _sharded_update_axes(other, self._plan)}
        return tuple(axis.name for axis in self._plan.mesh if axis.size > 1 and axis.name not in sharded)


def _sharded_update_axes(rule: ParamRule, plan: Plan) -> tuple[str, ...]:
    if not isinstance(rule.update, ReduceScatter):
        return ()
    return plan.step.batch_axes if rule.update.along is None else rule.update.along


def comparable(tensor: Tensor, *, is_shard: bool = False) -> bool:
    """Return whether a tensor lies here, dense, and as others hold it; of a slice only a Plan knows who holds it."""
    is_here = not (is_handle(tensor) or tensor.is_meta or tensor.layout is not torch.strided)
    return is_here and (is_shard or not is_module_held(tensor))


def explain_desync(*, has_sharded_layers: bool = False, has_tables: bool = False) -> str:
    """Return what usually lets ranks come apart."""
    if has_sharded_layers:
        return (
            "Gradients of whole parameters differ where each rank uses them for a part: name their module in px.shard, "
            "with style column between a column and its row, with style sequence where tokens are cut. If gradients "
            "were clipped by torch, use px.clip_grad_norm_."
        )
    if has_tables:
        return (
            "Each worker scaled its own gradients, or skipped a step alone: clip rows and dense parameters apart, "
            "clip_grad_norm_(model.head.parameters(), ...), and use bfloat16 rather than a GradScaler."
        )
    return (
        "Look for weights that are changed on some ranks only, by F.embedding(max_norm=) too, and for optimizers with "
        "other settings on some ranks."
    )


def watch(plan: Plan, model: nn.Module, device: torch.device) -> ReplicaComparison | None:
    """Return what compares the copies of a model's parameters; None when nothing is to be compared."""
    every = compare_every()
    if not every or not dist.is_initialized() or dist.get_world_size() == 1 or membership.current() is not None:
        return None  # in an elastic job one that joins counts its steps anew
    updates = [plan.rule_for(name).update for name, param in model.named_parameters() if param.requires_grad]
    if all(isinstance(update, Push) for update in updates):
        return None  # workers of servers meet nowhere, and one of them may be started again alone
    drift = ReplicaComparison(plan, model, every, device)
    return None if drift.is_idle else drift


def _ignore(*_: object) -> None:
    """Do nothing, in place of a hook."""
