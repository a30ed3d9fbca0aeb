"""`find_origin`: compute a step again, with its operators watched, and return where it is first not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from phalanx.comm.batch.loaded_batches import tensors_in
from phalanx.comm.local.random_state import RandomState
from phalanx.parallel.numerics.operator_watch import OperatorWatch, Sighting
from phalanx.parallel.numerics.origin import UNKNOWN, Origin, Stage, bad_rows, is_finite, kind_of

logger = logging.getLogger("phalanx.parallel")


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Whether autocast is on, and with which type, for each kind of device."""

    types: Mapping[str, torch.dtype | None]
    """None where it is off."""

    @classmethod
    def current(cls) -> AutocastState:
        """Return what is on now."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        return cls({
            kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds
        })  # fmt: skip

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute inside the block with these types."""
        with ExitStack() as stack:
            for kind, dtype in self.types.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
            yield


@dataclass(slots=True)
class ModelCall:
    """One forward pass of a model in training, with what is needed to compute it again."""

    model: nn.Module
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    states: RandomState
    look_up_samples: Callable[[], list[int] | None]
    """Returns the dataset indices of its rows."""

    output_grads: dict[int, Tensor] = field(default_factory=dict)
    """Gradients that reached its outputs, by their place."""

    autocast: AutocastState = field(default_factory=lambda: AutocastState.current())

    def unscaled(self, scale: float) -> ModelCall:
        """Return the same call with finite gradients of its outputs, as they are without a loss scale."""
        grads = {index: grad / scale for index, grad in self.output_grads.items() if is_finite(grad)}
        return replace(self, output_grads=grads)


@dataclass(frozen=True, slots=True)
class LossSeen:
    """A loss, and where its backward pass was called."""

    value: Tensor
    operator: str
    line: str
    is_unscaled: bool = False
    """Whether a GradScaler scaled it, and `value` is from before."""


def find_origin(calls: Sequence[ModelCall], losses: Sequence[LossSeen]) -> Origin | None:
    """Return where this rank's step is first not finite; None if nothing of its own is.

    Args:
        calls: The forward passes of the step.
        losses: What its backward passes began with.
    """
    if (origin := find_in_inputs(calls) or find_in_outputs(calls, losses)) is not None:
        return origin
    if not calls:
        return UNKNOWN
    return next((origin for call in calls if (origin := _in_gradients(call)) is not None), None)


def find_in_inputs(calls: Sequence[ModelCall]) -> Origin | None:
    """Return the weight or input that was not finite before the step computed anything."""
    for stage in (_in_weights, _in_inputs):
        for call in calls:
            if (origin := stage(call)) is not None:
                return origin
    return None


def find_in_outputs(calls: Sequence[ModelCall], losses: Sequence[LossSeen]) -> Origin | None:
    """Return what was first not finite in the forward pass or the loss. Collective where a model is sharded."""
    origins = [origin for call in calls if (origin := _in_outputs(call)) is not None]
    if origins:
        return origins[0]
    for loss in losses:
        if not is_finite(loss.value):
            return Origin(
                stage=Stage.LOSS, what=kind_of(loss.value), tensor="the loss", operator=loss.operator, line=loss.line
            )
    return None


def _in_weights(call: ModelCall) -> Origin | None:
    for name, tensor in (*call.model.named_parameters(), *call.model.named_buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if isinstance(tensor, nn.Parameter) and not is_finite(local):
            return Origin(stage=Stage.WEIGHT, what=kind_of(local), tensor=f"parameter {name}")
    return None


def _in_inputs(call: ModelCall) -> Origin | None:
    """Return the input that is not finite; minus infinity alone may be a mask."""
    for name, tensor in _inputs(call):
        if not is_finite(tensor) and not bool((tensor.isfinite() | tensor.isneginf()).all()):
            rows = bad_rows(tensor, len(tensor) if tensor.dim() else 0)
            return Origin(
                stage=Stage.INPUT,
                what=kind_of(tensor),
                tensor=f"input {name} of the model",
                rows=rows,
                samples=_samples(call, rows),
            )
    return None


def _in_outputs(call: ModelCall) -> Origin | None:
    watch = OperatorWatch(call.model)
    outputs = _compute_again(call, watch, {}, with_gradients=False)
    if outputs is None or all(is_finite(output) for output in outputs):
        return None
    return _of_sighting(call, watch.nan or watch.infinity or watch.module_output, Stage.OUTPUT, outputs[0])


def _in_gradients(call: ModelCall) -> Origin | None:
    for gradient in call.output_grads.values():
        if not is_finite(gradient):
            rows = bad_rows(gradient, len(gradient) if gradient.dim() else 0)
            return Origin(
                stage=Stage.GRADIENT,
                what=kind_of(gradient),
                tensor="the gradient of the loss by the model's output",
                rows=rows,
                samples=_samples(call, rows),
            )
    # Copies, so that no hook of the parameters runs, and nothing is reduced.
    params = {
        name: param.detach().clone().requires_grad_(param.requires_grad)
        for name, param in call.model.named_parameters()
    }
    watch = OperatorWatch(call.model)
    outputs = _compute_again(call, watch, params, with_gradients=True)
    if outputs is None:
        return UNKNOWN
    chosen = [(output, call.output_grads[i]) for i, output in enumerate(outputs) if i in call.output_grads]
    trained = [param for param in params.values() if param.requires_grad]
    if not chosen or not trained:
        return None
    try:
        with watch:
            grads = torch.autograd.grad([o for o, _ in chosen], trained, [g for _, g in chosen], allow_unused=True)
    except Exception as error:  # noqa: BLE001 -- such as memory that does not suffice for both
        logger.warning("the backward pass could not be computed again: %s", error)
        return UNKNOWN
    if watch.nan is None and all(g is None or is_finite(g) for g in grads):
        return None
    return _of_sighting(call, watch.nan or watch.infinity, Stage.GRADIENT, None)


def _of_sighting(call: ModelCall, sighting: Sighting | None, stage: Stage, output: Tensor | None) -> Origin | None:
    if sighting is None:
        return None if output is None else Origin(stage=stage, what=kind_of(output), tensor="the model's output")
    rows = bad_rows(sighting.result, _rows(call))
    return Origin(
        stage=stage,
        what=kind_of(sighting.result),
        tensor="an output" if stage is Stage.OUTPUT else "a gradient",
        module=sighting.module,
        operator=sighting.operator,
        line=sighting.line,
        rows=rows,
        samples=_samples(call, rows),
    )


def _compute_again(
    call: ModelCall, watch: OperatorWatch, params: dict[str, Tensor], *, with_gradients: bool
) -> list[Tensor] | None:
    """Return the outputs of a forward pass that is computed again, watched; None where it cannot be.

    Buffers are copies, and random numbers the same, so that nothing of the training changes.
    """
    buffers = {name: buffer.clone() for name, buffer in call.model.named_buffers()}
    try:
        if any(hasattr(param, "placements") for param in call.model.parameters()):
            with (
                call.states.in_use(),
                call.autocast.in_use(),
                torch.no_grad(),
                watch.modules(),
            ):  # torch's sharding bears no look at its operators
                output = call.model(*call.inputs, **call.named)
        else:
            with (
                call.states.in_use(),
                call.autocast.in_use(),
                torch.set_grad_enabled(with_gradients),
                watch.modules(),
                watch,
            ):
                output = functional_call(call.model, {**params, **buffers}, call.inputs, call.named)
    except Exception as error:  # noqa: BLE001 -- a model that cannot run twice has been checked up to here
        logger.warning("the forward pass could not be computed again: %s", error)
        return None
    return list(float_tensors(output))


def float_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point and complex tensors of a nest of containers, in order."""
    return (tensor for tensor in tensors_in(value) if tensor.is_floating_point() or tensor.is_complex())


def _inputs(call: ModelCall) -> Iterator[tuple[str, Tensor]]:
    for index, value in enumerate(call.inputs):
        for tensor in float_tensors(value):
            yield str(index), tensor
    for name, value in call.named.items():
        for tensor in float_tensors(value):
            yield repr(name), tensor


def _rows(call: ModelCall) -> int:
    tensors = [value for value in (*call.inputs, *call.named.values()) if isinstance(value, Tensor) and value.dim()]
    return len(tensors[0]) if tensors else 0


def _samples(call: ModelCall, rows: tuple[int, ...]) -> tuple[int, ...]:
    ids = call.look_up_samples() if rows else None
    return () if ids is None or any(row >= len(ids) for row in rows) else tuple(ids[row] for row in rows)
