"""`share_with_joiners`: the state that a rank which joins a running elastic job takes from a peer.

Objects register in the order in which the script makes them, the same on every rank. State that comes before its object
is registered waits for it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol


class PeerState(Protocol):
    """Has state that is the same on all ranks between two updates."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return numbers, text and tensors, in dicts, lists and tuples."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Take over what `state_dict` returned on another rank."""
        ...


class _Registry:
    """The objects of this process by name, and state that waits for its object."""

    def __init__(self) -> None:
        self.sources: dict[str, weakref.ref[Any]] = {}
        self.waiting: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()


_registry = _Registry()


def share_with_joiners(kind: str, source: PeerState) -> None:
    """Let ranks that join take over the state of an object, which lives as long as others refer to it.

    Args:
        kind: What it is; objects of one kind are numbered in the order of these calls.
        source: The object.
    """
    name = f"{kind}/{_registry.counts[kind]}"
    _registry.counts[kind] += 1
    _registry.sources[name] = weakref.ref(source)
    state = _registry.waiting.pop(name, None)
    if state is not None:
        source.load_state_dict(state)


def collect_state() -> dict[str, Mapping[str, Any]]:
    """Return the state of every registered object that still lives."""
    live = {name: reference() for name, reference in _registry.sources.items()}
    return {name: source.state_dict() for name, source in live.items() if source is not None}


def load_state(states: dict[str, dict[str, Any]]) -> None:
    """Load what `collect_state` returned on another rank; state of objects that are not registered yet waits."""
    for name, state in states.items():
        reference = _registry.sources.get(name)
        source = None if reference is None else reference()
        if source is None:
            _registry.waiting[name] = state
        else:
            source.load_state_dict(state)
