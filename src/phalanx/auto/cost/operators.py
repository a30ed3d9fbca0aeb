"""`estimate_passes`: cost of captured operators, forward and backward, full or sharded (pure).

The backward pass is told from the forward operators: a product has two, of the gradient with each operand, and what is
bound by memory reads one tensor more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.auto.capture.graph import ExpertCall, Operator
from phalanx.auto.cost.machine_model import OperatorTimes

_BOUND_BY_MEMORY = {
    "gelu": "gelu",
    "dropout": "dropout",
    "bernoulli": "dropout",
    "layer_norm": "layer_norm",
    "batch_norm": "batch_norm",
    "softmax": "softmax",
    "max_pool2d": "max_pool2d",
    "nll_loss": "cross_entropy",
}
"""Parts of operators' names, and what they are measured as; others are measured as element-wise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFraction:
    """What part of an operator a rank computes, along each of its extents."""

    samples: float = 1.0
    """Of the samples of the batch."""

    outer: float = 1.0
    """Of the output features of products with parameters; of heads in attention; of experts; of the last dim
    elsewhere."""

    inner: float = 1.0
    """Of the input features of products with parameters."""

    @classmethod
    def of_experts(cls, batch_parts: float, ranks: int, load: float = 1.0) -> ShardFraction:
        """Return what a rank computes of experts that so many ranks hold together, who each have a part of the batch.

        Args:
            batch_parts: Parts of the batch.
            ranks: Ranks that hold one copy of the experts.
            load: Tokens that come to its experts, over an even share.
        """
        return cls(samples=ranks * load / batch_parts, outer=1 / ranks)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of both passes."""

    forward: float
    backward: float
    weights: float = 0.0
    """Of the backward pass, gradients of parameters that are computed apart: others come with those of inputs."""


def estimate_passes(
    operators: Iterable[Operator], machine: OperatorTimes, share: ShardFraction, *, is_first: bool, trains: bool = True
) -> PassTimes:
    """Return the seconds of forward operators and of their backward passes.

    Args:
        operators: What runs one after another; views are free.
        machine: Of the rank.
        share: The part it computes.
        is_first: Whether nobody needs the gradient of their inputs.
        trains: Whether their parameters get gradients.
    """
    times = [_times(op, machine, share, is_first, trains) for op in operators if op.written_bytes]
    return PassTimes(
        *(sum(getattr(op_times, name) for op_times in times) for name in ("forward", "backward", "weights"))
    )


def _times(op: Operator, machine: OperatorTimes, share: ShardFraction, is_first: bool, trains: bool) -> PassTimes:
    if op.experts is not None:
        return _experts(op, op.experts, machine, share, is_first, trains)
    shapes = [read.value.shape for read in op.reads()]
    if "attention" in op.name and shapes and len(shapes[0]) == 4:
        rows, heads, seq, dim = shapes[0]
        extent = (rows * heads * share.samples * share.outer, seq, dim)
        return PassTimes(machine.attention_s(*extent), 0.0 if is_first else machine.attention_s(*extent, backward=True))
    if op.name.startswith("aten.convolution"):
        return _convolution(op, shapes, machine, share, not is_first, trains)
    product = _product(op, shapes, share)
    if product is not None:
        batch, m, n, k = product
        forward = machine.matmul_s(m, n, k, batch=batch)
        to_weight, to_input = machine.matmul_s(n, k, m, batch=batch), machine.matmul_s(m, k, n, batch=batch)
        has_right = trains if op.parameters else not is_first
        backward = (to_weight if has_right else 0.0) + (0.0 if is_first else to_input)
        return PassTimes(forward, backward, to_weight if has_right and op.parameters else 0.0)
    name = next((kind for part, kind in _BOUND_BY_MEMORY.items() if part in op.name), "elementwise")
    size = (op.read_bytes if name != "elementwise" else op.written_bytes) * share.samples * share.outer
    return PassTimes(machine.operator_s(name, size), 0.0 if is_first else machine.operator_s(name, size, backward=True))


def _experts(
    op: Operator, call: ExpertCall, machine: OperatorTimes, share: ShardFraction, is_first: bool, trains: bool
) -> PassTimes:
    """Return the seconds of experts that get as many tokens each, one after the other."""
    count, rows = call.experts * share.outer, call.copies * share.samples / call.experts
    size = op.written_bytes * share.samples * share.outer / count
    forward = machine.operator_s("elementwise", size) + sum(machine.matmul_s(rows, n, k) for n, k in call.matrices)
    to_weight = sum(machine.matmul_s(n, k, rows) for n, k in call.matrices) if trains else 0.0
    to_input = machine.operator_s("elementwise", size, backward=True)
    to_input += sum(machine.matmul_s(rows, k, n) for n, k in call.matrices)
    backward = to_weight + (0.0 if is_first else to_input)
    return PassTimes(count * forward, count * backward, count * to_weight)


def _convolution(
    op: Operator,
    shapes: list[tuple[int, ...]],
    machine: OperatorTimes,
    share: ShardFraction,
    to_input: bool,
    to_weight: bool,
) -> PassTimes:
    image, weight, out = shapes[0], shapes[1], op.outputs[0].shape
    groups: int = max(1, image[1] // weight[1])
    m, k = out[0] * math.prod(out[2:]) * share.samples, math.prod(weight[1:])
    extent = m, weight[0] // groups, k, groups
    pointwise = math.prod(weight[2:]) == 1
    backward = machine.conv_s(*extent, backward=True, pointwise=pointwise)
    weights = backward / 2 if to_weight else 0.0  # both are timed together
    return PassTimes(
        machine.conv_s(*extent, pointwise=pointwise), weights + (backward / 2 if to_input else 0.0), weights
    )


def _product(
    op: Operator, shapes: list[tuple[int, ...]], share: ShardFraction
) -> tuple[float, float, float, float] | None:
    """Return (products, m, n, k) of a matrix product, of the rank's part; None if the operator is none."""
    if op.name.startswith(("aten.addmm", "aten.mm")):
        left, right = shapes[-2:]
        if op.parameters:
            return 1, left[0] * share.samples, right[1] * share.outer, left[1] * share.inner
        return 1, left[0] * share.samples, right[1], left[1]
    if op.name.startswith(("aten.bmm", "aten.baddbmm")):
        left, right = shapes[-2:]
        return left[0] * share.samples * share.outer, left[1], right[2], left[2]
    if op.flops:
        edge = (op.flops * share.samples * share.outer * share.inner / 2) ** (1 / 3)
        return 1, edge, edge, edge
    return None
