"""`Passes`: tracks live forward passes and the running backward pass, and the batch that each belongs to.

A forward pass is of the batch its inputs are of. A backward pass is of the batch of the forward passes whose outputs
gradients arrive at; parameters ask for it once their gradients come. Where no such output is seen (a method other than
`forward` was called) it is of the batch that candidates leave (see `batches`).

Several forward passes of one backward pass may be of batches with different weights, as of two loaders. Parameters,
whose gradients are sums of both, then weigh 1, and each forward pass weighs what arrives at its outputs.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.comm.batch.backward_end import at_backward_end
from phalanx.comm.batch.batches import Batches
from phalanx.comm.batch.share import Shares, row_weight_of, weigh_alike
from phalanx.errors import ConfigError


class ForwardPass:
    """A forward pass whose graph is alive; its outputs refer to it."""

    def __init__(self, shares: Shares, *, weighs: bool, is_sum: bool = False) -> None:
        self.shares = shares
        self.weighs = weighs
        """Whether it can weigh all that arrives at its outputs."""

        self.is_sum = is_sum
        self.is_over = False
        """Whether a backward pass went through it."""


@dataclass(slots=True)
class _Backward:
    """A backward pass that runs."""

    shares: Shares
    """What parameters weigh by; empty also where the forward passes weigh."""

    arrived: list[ForwardPass] = field(default_factory=list)
    weights: dict[tuple[int, bool], float] = field(default_factory=dict)
    """What parameters weigh, by number of ranks and whether gradients are summed."""


@dataclass(slots=True)
class _Call:
    """A call of a model that has begun."""

    model: int
    """Identity of the model."""

    shares: Shares
    handled: BaseException | None
    """The exception that the script was handling when it called."""


class Passes:
    """The forward passes whose backward pass is to come, and the backward pass that runs."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._calls: dict[int, list[_Call]] = {}
        """By thread, the outer ones first: models may call models."""

        self._alive: list[weakref.ref[ForwardPass]] = []
        self._unseen: dict[Shares, ForwardPass] = {}
        """Forward passes without an output that could refer to them."""

        self._running: _Backward | None = None
        self._last: Shares | None = None
        """What the last backward pass was of, until the next forward pass."""

    # -- forward -------------------------------------------------------------------------------------------------

    def enter(self, inputs: Any) -> Shares:
        """Return what inputs of a model that is called now may be of."""
        is_training = torch.is_grad_enabled()
        if is_training and torch._C._current_graph_task_id() == -1:
            self._running = self._last = None  # a backward pass that raised does not end by itself
        return self._batches.resolve(inputs, is_training=is_training)

    def begin_forward(self, model: object, inputs: Any) -> None:
        """Note that a model is called with inputs, in this thread."""
        call = _Call(id(model), self.enter(inputs), sys.exception())
        self._calls.setdefault(threading.get_ident(), []).append(call)

    def end_forward(self, model: object) -> Shares | None:
        """Return what the call of a model that ends now is of; None if it raised, or its beginning was not seen."""
        calls = self._calls.get(threading.get_ident(), [])
        at = next((at for at in reversed(range(len(calls))) if calls[at].model == id(model)), None)
        if at is None:
            return None
        call = calls[at]
        del calls[at:]  # those within it were interrupted, as by Ctrl-C
        if not calls:
            del self._calls[threading.get_ident()]
        return call.shares if sys.exception() is call.handled else None

    def add(self, forward: ForwardPass, *, is_seen: bool) -> None:
        """Register a forward pass.

        Args:
            forward: The pass.
            is_seen: Whether one of its outputs refers to it.
        """
        self._alive.append(weakref.ref(forward))
        if not is_seen:
            self._unseen[forward.shares] = forward

    def may_mix(self, shares: Shares, ranks: int) -> bool:
        """Return whether the backward pass to come may be of further batches, of another weight."""
        further = {share for other in self._to_come() for share in other.shares}
        further.update(shares, self._batches.to_come())
        return len(further) > 1 and not weigh_alike(tuple(further), ranks)

    def now(self) -> Shares:
        """Return what a loss that is computed now may be of: the forward passes that wait for their backward pass."""
        to_come = self._to_come()
        if not to_come:
            return self._batches.resolve((), is_training=True)
        return tuple(dict.fromkeys(share for forward in to_come for share in forward.shares))

    def is_any_sum(self) -> bool:
        """Return whether the backward pass to come may be of a model whose gradients are summed over the ranks."""
        return any(forward.is_sum for forward in self._to_come())

    def _to_come(self) -> list[ForwardPass]:
        if not self._alive:
            return []
        forwards = [forward for reference in self._alive if (forward := reference()) is not None]
        waiting = [forward for forward in forwards if not forward.is_over]
        if len(waiting) < len(self._alive):
            self._alive = [weakref.ref(forward) for forward in waiting]
        return waiting

    # -- backward ------------------------------------------------------------------------------------------------

    def factor_at(self, forward: ForwardPass, ranks: int) -> float:
        """Return by what a forward pass multiplies a gradient that arrives at its outputs.

        Raises:
            ConfigError: If the batch it is of is not known, or it would have to weigh and cannot.
        """
        running = self._running or self._begin(forward, ranks)
        if forward not in running.arrived:
            running.arrived.append(forward)
        if running.shares == forward.shares:
            return 1.0
        at_params = row_weight_of(running.shares, ranks, is_sum=forward.is_sum)
        own = row_weight_of(forward.shares, ranks, is_sum=forward.is_sum)
        if own == at_params:
            return 1.0
        if not forward.weighs or not at_params:
            raise ConfigError(
                "one backward pass goes through forward passes on batches of different weight "
                f"({_rows(running.shares)} and {_rows(forward.shares)} rows), and outputs of a model cannot weigh what "
                "arrives at them. Call backward() for each batch, return one tensor or a tuple of tensors from "
                "forward(), or let all batches be even: drop_last=True."
            )
        return own / at_params

    def abandon_backward(self) -> None:
        """Let go of a backward pass that raised, whose forward passes are repeated now."""
        running, self._running = self._running, None
        for forward in running.arrived if running is not None else ():
            forward.is_over = True

    def of_backward(self, ranks: int) -> Shares:
        """Return what the gradients of parameters in the backward pass that runs are of."""
        return (self._running or self._begin(None, ranks)).shares

    def weight_of_backward(self, ranks: int, is_sum: bool = False) -> float:
        """Return what the gradients of parameters in the backward pass that runs weigh; see `row_weight_of`."""
        running = self._running or self._begin(None, ranks)
        weight = running.weights.get((ranks, is_sum))
        if weight is None:  # parameters ask one by one
            weight = running.weights[ranks, is_sum] = row_weight_of(running.shares, ranks, is_sum=is_sum)
        return weight

    def of_update(self) -> Shares:
        """Return all that the backward pass that runs, or the last, is of; what is in hand where none was seen."""
        if self._running is not None:
            return _all_of(self._running)
        in_hand = self._batches.in_hand
        return self._last if self._last is not None else () if in_hand is None else (in_hand,)

    def _begin(self, first: ForwardPass | None, ranks: int) -> _Backward:
        self._running = running = _Backward(self._shares_for(first, ranks))
        at_backward_end(self._end)
        return running

    def _shares_for(self, first: ForwardPass | None, ranks: int) -> Shares:
        to_come: Sequence[ForwardPass] = self._to_come()
        if first is None and not to_come:
            return self._batches.resolve((), is_training=True)
        of = [share for forward in to_come for share in forward.shares]
        passes = to_come if first is None else [first, *to_come]
        shares = tuple(dict.fromkeys((*of, *(first.shares if first is not None else ()))))
        overlooked = self._batches.overlooked()
        if not weigh_alike([*shares, *overlooked], ranks) and overlooked:
            return tuple(dict.fromkeys((*shares, *overlooked)))
        if weigh_alike(shares, ranks):
            return shares if first is None else first.shares
        if all(forward.weighs for forward in passes):
            return ()
        return shares if first is None else first.shares

    def _end(self) -> None:
        running, self._running = self._running, None
        self._unseen.clear()
        self._batches.end_backward()
        if running is None:
            return
        self._last = _all_of(running)
        for forward in running.arrived:
            forward.is_over = True


def _all_of(running: _Backward) -> Shares:
    arrived = [share for forward in running.arrived for share in forward.shares]
    return tuple(dict.fromkeys((*running.shares, *arrived)))


def _rows(shares: Shares) -> str:
    return " or ".join(str(share.global_rows) for share in shares) or "even"
