"""Gradient accumulation: `optimizer.step()` updates every k batches.

The script stays as it is: it calls `backward`, `step` and `zero_grad` for every batch. Between updates `step` and
`zero_grad` hold back, gradients accumulate on each rank, and the last backward pass of a group reduces their sum. Where
ranks may leave and join each batch is reduced by itself, so that every rank has the whole sum and nothing of it is lost
with another.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import phalanx.comm.context as context_of
from phalanx.errors import ConfigError
from phalanx.parallel.data.replicas.accumulated_gradients import RoundTotal
from phalanx.parallel.model_shape import is_handle
from phalanx.parallel.session import StepPhase, session
from phalanx.parallel.step.hooks import add_action

logger = logging.getLogger("phalanx.parallel")


def is_partial(param: Tensor) -> bool:
    """Return whether the next `optimizer.step()` will only hold this parameter's gradient."""
    merge = _merge_of(param)
    return merge is not None and not merge.is_last


def is_reduced_by_batch(param: Tensor) -> bool:
    """Return whether what is accumulated for this parameter is not in its `grad`, which is of one batch."""
    merge = _merge_of(param)
    return merge is not None and merge.reduces_batches


def _merge_of(param: Tensor) -> GradientAccumulation | None:
    reference = session.accumulations.get(param) if session.accumulations else None
    return None if reference is None else reference()


class _NoSyncUntilUpdate:
    """Keeps a model's backward passes from reducing while none of its optimizers is about to update."""

    def __init__(self, block: Callable[[], AbstractContextManager[Any]]) -> None:
        self._block = block
        self._now: ExitStack | None = None
        self.merges: list[GradientAccumulation] = []

    def renew(self) -> None:
        """Enter the block anew: what reduces is another one now."""
        if self._now is not None:
            self._now.close()
        self._now = None
        self.follow()

    def follow(self) -> None:
        if not self.merges or any(merge.is_last for merge in self.merges):
            if self._now is not None:
                self._now.close()
            self._now = None
        elif self._now is None:
            self._now = ExitStack()
            self._now.enter_context(self._block())


class GradientAccumulation:
    """The group of batches that one optimizer is adding up; made by `accumulate_gradients`."""

    def __init__(self, steps: int, avg: bool, quiet: _NoSyncUntilUpdate, *, reduces_batches: bool = False) -> None:
        self.steps = steps
        """Batches of a group."""

        self.reduces_batches = reduces_batches
        """Whether each batch is reduced by itself, so that all ranks have the same sum."""

        self.total = RoundTotal()
        """What waits for the update and is reduced."""

        self._avg = avg
        self._quiet = quiet
        self.hooks: list[RemovableHandle] = []
        self.param_hooks: list[RemovableHandle] = []
        self._begin()
        quiet.merges.append(self)
        quiet.follow()

    def hook_params(self, optimizer: Optimizer) -> None:
        """Weigh the gradients of the parameters from now on, after what acts on them already."""
        for hook in self.param_hooks:
            hook.remove()
        params = list_params(optimizer)
        self.param_hooks = [param.register_hook(self.weight) for param in params if param.requires_grad]

    def follow_reducer(self, optimizer: Optimizer) -> None:
        """Continue as before where another reducer has taken the place of the model's."""
        self.hook_params(optimizer)
        self._quiet.renew()

    def _begin(self) -> None:
        self.held = 0
        """Batches whose gradients wait for the update."""

        self._first_rows: tuple[int, ...] | None = None
        self._batches = 0.0

    @property
    def is_last(self) -> bool:
        """Whether the next step updates."""
        return self.held == self.steps - 1

    def weight(self, gradient: Tensor) -> Tensor | None:
        """Give an incoming gradient its share of the mean, by the rows of its batch."""
        if not self._avg:
            return None
        context = context_of.current()
        context.passes.of_backward(context.readers.count)
        return gradient * (self._relative_rows() / self.steps)

    def admit(self, optimizer: Optimizer) -> bool:
        """Hold a step back, or complete the group and let it through."""
        self._batches += self._relative_rows()
        completes, params = self.is_last, list_params(optimizer)
        if completes or self.reduces_batches:
            self.total.add_to(params)
        if not completes:
            self.held += 1
            if self.reduces_batches:
                self.total.take(params)
        else:
            if self._avg and self._batches != self.steps:
                _multiply(optimizer, self.steps / self._batches)
            self._begin()
        self._quiet.follow()
        return completes

    def state_dict(self) -> dict[str, Any]:
        """Return how far the group is."""
        return {"held": self.held, "batches": self._batches, "first_rows": list(self._first_rows or ()) or None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.held, self._batches = state["held"], state["batches"]
        first = state["first_rows"]
        self._first_rows = (first,) if isinstance(first, int) else tuple(first or ()) or None
        self._quiet.follow()

    def end(self) -> None:
        """Leave gradients alone from now on."""
        for hook in (*self.hooks, *self.param_hooks):
            hook.remove()
        self._quiet.merges.remove(self)
        self._quiet.follow()

    def _relative_rows(self) -> float:
        """Return the rows of the global batch that was trained on, in those of the group's first.

        Raises:
            ConfigError: If it is of several batches, of which one is not full, so that it has no one weight.
        """
        rows = tuple(share.global_rows for share in context_of.current().passes.of_update())
        if not rows:
            return 1.0
        self._first_rows = self._first_rows or rows
        if rows == self._first_rows:
            return 1.0
        if len(rows) == len(self._first_rows) == 1:
            return rows[0] / self._first_rows[0]
        raise ConfigError(
            f"gradient_merge weighs each batch by its rows, and a backward pass was of batches of {rows} rows after "
            f"batches of {self._first_rows}. Leave out last batches that are not full (drop_last=True), call "
            "backward() for each batch, or px.use_batch(batch) where the loader's tensors do not reach the model."
        )


def accumulate_gradients(
    optimizer: Optimizer,
    model: nn.Module,
    k_steps: int,
    *,
    avg: bool = True,
    quiet: Callable[[], AbstractContextManager[Any]] = nullcontext,
    reduces_batches: bool = False,
) -> GradientAccumulation:
    """Update once every `k_steps` calls of `optimizer.step()`.

    Groups run on over the ends of epochs. Batches left over when training ends are not applied; a warning says how
    many. A scheduler that is stepped for every batch belongs in `follow_updates`.

    Args:
        optimizer: Any torch optimizer over parameters of the model; its and the model's `zero_grad` hold back too.
        model: The model, distributed or not.
        k_steps: Batches of a group, at least 1.
        avg: Whether the mean over the rows of the group is applied, or the sum of the batches' gradients.
        quiet: Makes the block inside which backward passes do not reduce: `partial(no_sync, model)`.
        reduces_batches: Whether every backward pass reduces, and the sums of its gradients add up here.

    Returns:
        The group, for those who ask how many batches wait.

    Raises:
        ConfigError: If `k_steps` is below 1, the gradients of the optimizer are merged already, or it trains a table.
    """
    if k_steps < 1:
        raise ConfigError(f"gradient_merge needs k_steps of at least 1, found {k_steps}.")
    params = list_params(optimizer)
    if any(_merge_of(param) for param in params):
        raise ConfigError("the gradients of these parameters are accumulated already. Call accumulate_gradients once.")
    if any(is_handle(param) for param in params):
        raise ConfigError(
            "gradient_merge holds gradients back between updates, and the optimizer trains rows of a table "
            "(SparseEmbedding), which change at every step. Turn gradient_merge off."
        )
    before = model.__dict__.get("zero_grad")
    zero_grad = before if isinstance(before, _ZeroGrad) else _ZeroGrad(model, _NoSyncUntilUpdate(quiet))
    merge = GradientAccumulation(k_steps, avg, zero_grad.quiet, reduces_batches=reduces_batches)
    for param in params:
        session.accumulations[param] = weakref.ref(merge)  # it knows the model
    merge.hook_params(optimizer)
    if _is_sharded(model):
        from phalanx.parallel.zero import sharded  # a job that shards nothing does not wait for this

        # Hooks of slices see only what comes from outside the forward pass.
        own = {id(param) for param in params}
        names = {name for name, param in model.named_parameters() if id(param) in own}
        merge.hooks.append(sharded.hook_gathered(model, merge.weight, names))
    add_action(optimizer, StepPhase.ACCUMULATE_GRADIENTS, merge.admit)
    optimizer.zero_grad = partial(_zero_grad, weakref.ref(optimizer), merge)  # type: ignore[method-assign]
    model.zero_grad = zero_grad  # type: ignore[method-assign]
    weakref.finalize(optimizer, _end, merge, k_steps, context_of.current().rank)
    return merge


def list_params(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer trains."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")  # of FSDPModule, whose import is slow


class AccumulatedGradients:
    """What waits for the update of an optimizer, as checkpoints hold it (`keep_state`).

    Args:
        optimizer: Its gradients are merged.
        merge: Its group.
        is_sharded: Whether torch keeps the gradients of a group to itself; the group then begins anew.
        is_sum: Whether gradients are summed over the ranks. At another number of ranks those of a checkpoint are shared
            out, which a sum that is `reduced` already would not survive.
    """

    def __init__(
        self, optimizer: Optimizer, merge: GradientAccumulation, *, is_sharded: bool, is_sum: bool = False
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._merge = merge
        self._is_sharded, self._is_sum = is_sharded, is_sum

    def state_dict(self) -> dict[str, Any]:
        """Return how far the group is, and the gradients of this rank; those of unused parameters as zeros.

        What is `reduced` already is the same on all ranks.
        """
        if self._merge.held and self._is_sharded:
            logger.warning(
                "gradient_merge: the checkpoint is without the gradients of %d batches that wait for an update, which "
                "sharding cannot save. Save after an update.",
                self._merge.held,
            )
        elif self._merge.held and _has_shared_replicas() and not self._merge.reduces_batches:
            logger.warning(
                "gradient_merge: the checkpoint is without the gradients of %d global batches that wait for an update: "
                "several logical replicas of this rank have one each. Save after an update.",
                self._merge.held,
            )
        elif self._merge.held:
            gradients = {
                name: torch.zeros_like(param) if param.grad is None else param.grad
                for name, param in ({} if self._merge.reduces_batches else self._params()).items()
            }
            reduced = {str(number): sum_ for number, sum_ in enumerate(self._merge.total.gradients) if sum_ is not None}
            return {"group": self._merge.state_dict(), "gradients": gradients, "reduced": reduced}
        return {"group": None, "gradients": {}, "reduced": {}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; what waited here is forgotten."""
        group, own, reduced = state["group"], state["gradients"], state.get("reduced", {})
        if reason := self._why_unusable(own, reduced):
            logger.warning(
                "gradient_merge: the checkpoint has gradients of %d batches that are %s; the update begins again. Save "
                "after an update.",
                group["held"],
                reason,
            )
            group, own, reduced = None, {}, {}
        self._merge.load_state_dict(group or {"held": 0, "batches": 0.0, "first_rows": None})
        params = self._params()
        for name, param in params.items():
            param.grad = _like(own.get(name), param)
        optimizer = self._optimizer()
        self._merge.total.gradients = [
            _like(reduced.get(str(number)), param)
            for number, param in enumerate([] if optimizer is None or not reduced else list_params(optimizer))
        ]

    def _why_unusable(self, own: dict[str, Tensor], reduced: dict[str, Tensor]) -> str:
        """Return why gradients of a checkpoint cannot be added to in this job; empty if they can."""
        if self._merge.reduces_batches and own:
            return "those of its ranks, and ranks of this job may leave and join (-n a:b)"
        if self._is_sum and reduced and not self._merge.reduces_batches:
            return "a sum over its ranks, which could leave and join (-n a:b), and each rank of this job has its own"
        return ""

    def _params(self) -> dict[str, Tensor]:
        optimizer = self._optimizer()
        params = [] if optimizer is None else list_params(optimizer)
        return {str(number): p for number, p in enumerate(params) if p.requires_grad and not p.is_meta}


def _like(gradient: Tensor | None, param: Tensor) -> Tensor | None:
    """Return a gradient as one of a parameter; None where it is not used."""
    is_used = gradient is not None and bool(gradient.any())
    return gradient.to(param.device, param.dtype, copy=True) if gradient is not None and is_used else None


def _has_shared_replicas() -> bool:
    replicas = context_of.current().replicas
    return replicas is not None and len(replicas.local) > 1


class _ZeroGrad:
    """A model's `zero_grad` that leaves held gradients alone; a copy of the model gets the plain one."""

    def __init__(self, model: nn.Module, quiet: _NoSyncUntilUpdate) -> None:
        self._model = model
        self.quiet = quiet

    def __call__(self, set_to_none: bool = True) -> None:
        accumulated = [(param, param.grad) for param in self._model.parameters() if _is_held(param)]
        for param, _ in accumulated:
            param.grad = None
        type(self._model).zero_grad(self._model, set_to_none)
        for param, gradient in accumulated:
            param.grad = gradient

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (nn.Module.zero_grad, self._model)


def _is_held(param: Tensor) -> bool:
    merge = _merge_of(param)
    return merge is not None and merge.held > 0


def _zero_grad(optimizer: weakref.ref[Optimizer], merge: GradientAccumulation, set_to_none: bool = True) -> None:
    live = optimizer()
    if live is not None and not merge.held:
        type(live).zero_grad(live, set_to_none)


@torch.no_grad()
def _multiply(optimizer: Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(factor)


def _end(merge: GradientAccumulation, k_steps: int, rank: int) -> None:
    merge.end()
    if merge.held and rank == 0:
        logger.warning(
            "gradient_merge: training ended with the gradients of %d batches not applied; %d make one update. Train a "
            "multiple of %d batches to use all.",
            merge.held,
            k_steps,
            k_steps,
        )
