"""`CapturedStep`: the operator graph of a captured training step: operators, reads, outputs, saved tensors."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from phalanx.plan.shape import ParamShape

Phase = Literal["forward", "loss", "backward"]
Level = Literal["graph", "modules", "hooks"]

LEVELS: tuple[Level, ...] = ("graph", "modules", "hooks")
"""How much is known, the most first: every operator; every operator of repeated blocks; module by module."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Shape and dtype of a tensor; the dtype is torch's name without the prefix."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor that an operator reads."""

    source: int | str
    """Position of the operator that made it, or `parameter:<name>`, `buffer:<name>`, `sample:<number>`, `constant`."""

    output: int
    """Which of that operator's outputs."""

    value: TensorShape


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """A call of a module that holds the experts of a mixture, as style `expert` takes it."""

    experts: int
    copies: int
    """Tokens, each as often as experts were chosen for it."""

    token_bytes: int
    """Bytes of one of them."""

    weight_bytes: int
    """Bytes of the weight of one choice."""

    matrices: tuple[tuple[int, int], ...]
    """Outputs and inputs of each matrix of an expert."""

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass, in which a matrix meets each copy once."""
        return 2 * self.copies * sum(outputs * inputs for outputs, inputs in self.matrices)


Argument: TypeAlias = "Read | int | float | bool | str | tuple[Argument, ...] | None"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator of the step, or what one module ran in a row where single operators are not known."""

    name: str
    """torch's name, such as `aten.mm.default`; the class of the module where operators were put together."""

    module: str
    """Path of the innermost module it came from; in backward that of the forward operator."""

    call: int
    """Which call of that module it came from, counted from 0 and with those of recomputation."""

    phase: Phase
    origin: int | None
    """In backward, the position of the operator whose gradient it takes; None for what runs a second time."""

    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[TensorShape, ...]
    parameters: tuple[str, ...]
    """Parameters it reads, also through views."""

    trained: tuple[str, ...] = ()
    """Of these, in forward, those that get a gradient through it; of operators that were put together, as often as they
    do."""

    flops: int
    """Two per multiplication and addition, by the formulas of `torch.utils.flop_counter`; 0 where it has none."""

    read_bytes: int
    written_bytes: int
    saved_bytes: int
    """Bytes it made that autograd keeps for the backward pass, but for those that the model returns."""

    returned_bytes: int
    """Bytes it made that the model returns, whether autograd keeps them or not."""

    returned_saved_bytes: int
    """Of these, bytes that autograd keeps for the backward pass too."""

    temporary_bytes: int
    """Bytes it made that are there until `temporary_until` alone: neither kept for the backward pass nor returned, nor
    the gradient of a parameter. Of operators that were put together, without what no other one reads."""

    temporary_until: int
    """Position of the last operator that reads these; its own if none does."""

    last_use: int
    """Position of the last operator that reads memory it made; its own if none does."""

    returned: bool = False
    """Whether the model returns a tensor that it made."""

    experts: ExpertCall | None = None
    """What it is a call of, where it is all that the experts of a mixture compute; None of any other operator."""

    def reads(self) -> Iterator[Read]:
        """Yield the tensors it reads, in the order of its arguments."""
        for argument in (*self.arguments, *(value for _, value in self.keywords)):
            yield from reads_in(argument)


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedStep:
    """A training step without optimizer: forward, loss and backward pass of a model on one batch."""

    level: Level
    reasons: tuple[str, ...]
    """Why each better level was not used, best level first: `graph: ...`."""

    operators: tuple[Operator, ...]
    modules: tuple[tuple[str, str], ...]
    """Path and class of every module, the model itself first, with the empty path."""

    parameters: tuple[ParamShape, ...]
    """Each once, tied ones under their first name; `trainable` is false for frozen ones."""

    buffers: tuple[ParamShape, ...]
    tied: tuple[tuple[str, str], ...]
    """Other names of parameters, each with the first one."""

    blocks: tuple[tuple[str, ...], ...]
    """Groups of paths of modules whose forward operators are alike but for which parameters they read."""

    @property
    def flops(self) -> int:
        """Floating-point operations of forward, loss and backward pass."""
        return sum(operator.flops for operator in self.operators)

    @property
    def saved_bytes(self) -> int:
        """Bytes of activations that the forward pass keeps for the backward pass."""
        return sum(operator.saved_bytes for operator in self.operators)

    def list_live_bytes(self, *, return_outputs: bool = True) -> list[int]:
        """Return the bytes that operators made and that are there while each runs, without gradients of parameters.

        Args:
            return_outputs: Whether the loop keeps what the model returns, which then is not counted. Otherwise it is
                there up to the end of the loss, or as long as autograd keeps it.
        """
        changes = [0] * (len(self.operators) + 1)
        loss_end = max((at for at, operator in enumerate(self.operators) if operator.phase != "backward"), default=0)
        for at, operator in enumerate(self.operators):
            changes[at] += operator.saved_bytes + operator.temporary_bytes
            changes[operator.last_use + 1] -= operator.saved_bytes
            changes[operator.temporary_until + 1] -= operator.temporary_bytes
            if not return_outputs:
                changes[at] += operator.returned_bytes
                changes[loss_end + 1] -= operator.returned_bytes - operator.returned_saved_bytes
                changes[max(operator.last_use, loss_end) + 1] -= operator.returned_saved_bytes
        return list(itertools.accumulate(changes[:-1]))

    def within(self, path: str) -> tuple[Operator, ...]:
        """Return the operators of a module and of those inside it; all for the empty path."""
        return tuple(op for op in self.operators if not path or op.module == path or op.module.startswith(path + "."))

    def digest(self) -> str:
        """Return 16 hex digits over the model and its forward pass: the same in every process, whatever the loss is.

        A Plan places operators of the forward pass alone: to it, a step with a loss and one without are the same.
        """
        # A plain walk over the fields would be JSON of twice the size; the form of a dataclass is as canonical.
        forward = [
            (operator.name, operator.module, operator.call, operator.arguments, operator.keywords, operator.outputs)
            for operator in self.operators
            if operator.phase == "forward"
        ]
        content = (forward, self.modules, self.parameters, self.buffers, self.tied)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def reads_in(argument: Argument) -> Iterator[Read]:
    """Yield the reads in one argument."""
    if isinstance(argument, Read):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from reads_in(part)


def with_reads(argument: Argument, change: Callable[[Read], Argument]) -> Argument:
    """Return an argument with its reads replaced."""
    if isinstance(argument, Read):
        return change(argument)
    if isinstance(argument, tuple):
        return tuple(with_reads(part, change) for part in argument)
    return argument
