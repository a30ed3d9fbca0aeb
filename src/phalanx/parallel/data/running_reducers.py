"""`RunningReducers`: the reducers of the backward pass that runs, in an order that is the same on every rank."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch

from phalanx.comm.batch.backward_end import is_repeated
from phalanx.errors import ConfigError


class Numbered(Protocol):
    """What reduces the gradients of one model."""

    number: int
    """Its place among those of this process."""


ReducerT = TypeVar("ReducerT", bound=Numbered)


class RunningReducers(Generic[ReducerT]):
    """The reducers of the backward pass that runs now; the first may issue buckets before its end."""

    def __init__(self) -> None:
        self._pass = -1
        self._reducers: list[ReducerT] = []

    def join(self, reducer: ReducerT) -> None:
        """Add one whose gradients have begun to come."""
        now = torch._C._current_graph_task_id()
        if now != self._pass and not is_repeated():  # else a pass that raised an error has left its own
            self._reducers = []
        self._pass = now
        self._reducers.append(reducer)

    def is_first(self, reducer: ReducerT) -> bool:
        """Return whether a reducer was the first to join."""
        return bool(self._reducers) and self._reducers[0] is reducer

    def leave(self, reducer: ReducerT) -> list[ReducerT]:
        """Return all that have to finish now, in an order that is the same on every rank."""
        if reducer not in self._reducers:  # of a pass within this one
            return [reducer]
        first, *others = self._reducers
        self._reducers = []
        return [first, *sorted(others, key=lambda other: other.number)]


def check_no_graph() -> None:
    """Raise if the backward pass that runs creates a graph.

    Raises:
        ConfigError: Says what to call instead.
    """
    if torch.is_grad_enabled():
        raise ConfigError(
            "a backward pass with create_graph=True came to a distributed model, whose gradients are averaged over "
            "the ranks outside of any graph: what is computed from them would have wrong gradients. For a penalty "
            "of the gradients of inputs use torch.autograd.grad(output, inputs, create_graph=True), and no "
            "sharding."
        )
