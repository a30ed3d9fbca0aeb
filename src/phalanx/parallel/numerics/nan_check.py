"""`check_nan_inf`: test the gradients and the loss of each step, and end all ranks with what was first not finite.

One fused test of all gradients before each update. What it takes to compute a step again is kept by reference: the
inputs of the model, and the gradient that reached its output. Only when a test fails is the step computed again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from phalanx.comm.local.random_state import RandomState
from phalanx.comm.local.script_line import script_line
from phalanx.errors import NotFiniteError
from phalanx.parallel.numerics.locate import (
    LossSeen,
    ModelCall,
    find_in_inputs,
    find_in_outputs,
    find_origin,
    float_tensors,
)
from phalanx.parallel.numerics.origin import UNKNOWN, Stage, is_finite
from phalanx.parallel.numerics.origin_exchange import OriginExchange
from phalanx.parallel.numerics.scaler_watch import ScalerWatch
from phalanx.parallel.observe.losses import watch_losses
from phalanx.parallel.observe.models import ModelTracker, is_called_by_script
from phalanx.parallel.observe.sample_ids import sample_ids
from phalanx.parallel.session import list_applied, parameter_name, session
from phalanx.parallel.step.torch_scaler import has_overflowed
from phalanx.plan.rules.collective_pass import why_collective

_MOST_CALLS = 64
"""Forward passes of a step that are remembered, the last ones: gradients may be accumulated over many."""


@cache
def check_nan_inf() -> None:
    """Check every step of this process from now on."""
    NanCheck().install()


class NanCheck:
    """Looks at each optimizer step of a script, whatever it trains with."""

    def __init__(self) -> None:
        self._tracker = ModelTracker()
        self._depth: list[nn.Module] = []
        self._calls: deque[ModelCall] = deque(maxlen=_MOST_CALLS)
        self._losses: deque[LossSeen] = deque(maxlen=_MOST_CALLS)
        self._scalers = ScalerWatch(self._on_no_call)
        self._exchange = OriginExchange()
        self._search: list[Any] = []
        self._running: tuple[nn.Module, RandomState] | None = None
        """A model in its first call, and the random state before it."""

        self._steps = 0
        self._is_locating = False
        """Whether the step is being computed again."""

    def install(self) -> None:
        """Put the hooks in place."""
        # Which modules a script calls is seen in the first step; after that only these have hooks.
        self._search = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        watch_losses(self._on_loss)
        self._scalers.install()
        sample_ids.watch()
        session.on_overflow = self._on_left_out
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    # -- what the step computes --------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if is_called_by_script():
            if not self._depth and (model := self._tracker.add(module)) is not None:
                model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)
                model.register_forward_hook(self._after_forward)
                # A call that runs already has no new hook before it; one inside a wrapper has.
                self._running = (model, RandomState.current()) if model is module else None
            self._depth.append(module)

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Note a first call; `rest` is the named inputs and the output, or the output alone of a call that raised."""
        if self._running is not None and self._running[0] is module:
            if len(rest) == 2 and module.training and torch.is_grad_enabled():
                self._calls.append(ModelCall(module, args, rest[0], self._running[1], sample_ids.look_up()))
            self._running = None
        if is_called_by_script() and any(other is module for other in self._depth):
            while self._depth.pop() is not module:
                pass

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model.training and torch.is_grad_enabled() and is_called_by_script() and not self._is_locating:
            self._calls.append(ModelCall(model, args, kwargs, RandomState.current(), sample_ids.look_up()))

    def _after_forward(self, model: nn.Module, _args: Any, output: Any) -> None:
        if self._is_locating or not self._calls or self._calls[-1].model is not model or not torch.is_grad_enabled():
            return
        grads = self._calls[-1].output_grads
        for index, tensor in enumerate(float_tensors(output)):
            if tensor.requires_grad:
                tensor.register_hook(_Keep(grads, index))

    def _on_loss(self, loss: Tensor) -> None:
        unscaled = self._scalers.unscale(loss)
        loss = loss if unscaled is None else unscaled
        operator = "" if loss.grad_fn is None else re.sub(r"Backward\d*$", "", loss.grad_fn.name())
        self._losses.append(LossSeen(loss.detach(), operator, script_line(), unscaled is not None))

    # -- the step ----------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        self._scalers.note_call()
        if torch.compiler.is_compiling() or session.is_trial:
            return
        if self._scalers.is_stepping and has_overflowed(optimizer):
            self._judge_left_out(optimizer, self._scalers.scale)
            return
        grads = _gradients(optimizer)
        # A loss that is scaled may be too large where its gradients are not, which the scaler has looked at.
        losses = () if _is_loss_scaled(optimizer) else tuple(loss.value for loss in self._true_losses())
        is_bad = not _are_finite([*grads, *losses])
        if _is_split() and dist.is_initialized():
            flag = torch.tensor([float(is_bad)], device=grads[0].device if grads else None)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            is_bad = bool(flag.item())
        if is_bad:
            self._raise(optimizer)

    def _after_step(self, _optimizer: Optimizer, _args: Any, _named: Any) -> None:
        if not torch.compiler.is_compiling() and not session.is_trial:
            self._forget_step()
            self._steps += 1
            for handle in self._search:
                handle.remove()
            self._search.clear()

    def _on_no_call(self, optimizer: Optimizer, scale: float) -> None:
        if not _are_finite(_gradients(optimizer)):  # else it accumulates
            self._on_left_out(optimizer, scale)

    def _on_left_out(self, optimizer: Optimizer, scale: float | None) -> None:
        self._scalers.note_call()
        if session.is_trial:
            return
        self._judge_left_out(optimizer, self._scalers.scale if scale is None else scale)
        self._forget_step()
        self._steps += 1

    def _judge_left_out(self, optimizer: Optimizer, scale: float) -> None:
        """Tell a step that is left out as the loss scale is too large from one with a NaN of its own.

        It has one if the forward pass, the loss, or a backward pass that is computed again without the scale is not
        finite, on any rank; or if nothing was made larger. Else the scale falls, and this is looked at again.

        Raises:
            NotFiniteError: If it has.
        """
        if scale <= 1.0:
            self._raise(optimizer)
        if _is_split():  # to compute again is collective there
            return
        losses = [loss for loss in self._losses if loss.is_unscaled or bool(loss.value.isnan())]
        self._is_locating = True
        try:
            with torch.no_grad():
                origin = find_origin([call.unscaled(scale) for call in self._calls], losses)
        finally:
            self._is_locating = False
        rank, earliest = self._exchange.earliest_of_left_out(origin or UNKNOWN, self._steps)
        if earliest.stage < Stage.UNKNOWN:
            raise NotFiniteError(earliest.describe(rank, self._steps, _world()))

    def _true_losses(self) -> list[LossSeen]:
        """Return the losses whose values say something: of a scaled one that is its value before."""
        return [loss for loss in self._losses if loss.is_unscaled or not self._scalers.is_stepping]

    def _forget_step(self) -> None:
        self._calls.clear()
        self._losses.clear()

    def _raise(self, optimizer: Optimizer) -> None:
        """Find where it came from, hear what other ranks found, and raise the same on all.

        Raises:
            NotFiniteError: Always.
        """
        self._is_locating = True
        calls, losses = tuple(self._calls), self._true_losses()
        unknown = replace(UNKNOWN, tensor=_gradient_name(optimizer))
        with torch.no_grad():
            if not _is_split():
                origin = find_origin(calls, losses) or replace(unknown, stage=Stage.REDUCED)
                rank, earliest = self._exchange.earliest(origin, self._steps)
            else:  # to compute again is collective, so all ranks do, or none does
                rank, earliest = self._exchange.earliest(find_in_inputs(calls) or unknown, self._steps, "inputs")
                if earliest.stage is Stage.UNKNOWN:
                    origin = find_in_outputs(calls, losses) or unknown
                    rank, earliest = self._exchange.earliest(origin, self._steps, "outputs")
        raise NotFiniteError(earliest.describe(rank, self._steps, _world()))


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class _Keep:
    """Keeps the gradient of an output, by reference."""

    def __init__(self, grads: dict[int, Tensor], index: int) -> None:
        self._grads, self._place = grads, index

    def __call__(self, gradient: Tensor) -> None:
        self._grads[self._place] = gradient.detach()


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers are finite, by one sum of each tensor and one look at each device."""
    plain = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    dense = [t.detach() for t in plain if t.layout is torch.strided and t.is_floating_point() and t.numel()]
    others = [t for t in plain if t.layout is not torch.strided]
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in dense:
        by_device.setdefault(tensor.device, []).append(tensor)
    sums = [torch.stack(_sums(some)) for some in by_device.values()]
    if all(bool(total.isfinite().all()) for total in sums) and all(map(is_finite, others)):
        return True
    return all(map(is_finite, plain))  # a sum may be too large though no number is


def _sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a number for each tensor that is finite only if all of the tensor is."""
    if tensors[0].is_cpu:  # where torch's norms take ten times as long
        return [tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).double() for tensor in tensors]
    return [norm.double() for norm in torch._foreach_norm(list(tensors))]


def _is_loss_scaled(optimizer: Optimizer) -> bool:
    return any(param in session.loss_scaled for group in optimizer.param_groups for param in group["params"])


def _is_split() -> bool:
    """Return whether ranks may have other gradients, or cannot compute a step again alone."""
    return any(applied.is_sharded or why_collective(applied.plan) is not None for applied in list_applied())


def _gradient_name(optimizer: Optimizer) -> str:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and not _are_finite([param.grad]):
                return f"the gradient of {parameter_name(param) or f'a parameter of shape {tuple(param.shape)}'}"
    return "a gradient"
