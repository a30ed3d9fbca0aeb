"""`share_with_joiners`: the state that a rank which joins a running elastic job takes from a peer.

Objects register in the order in which the script makes them, the same on every rank. State that comes before its object
is registered waits for it.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from phalanx.errors import ConfigError


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
        self.ended: set[str] = set()
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


def end_sharing(source: PeerState) -> None:
    """Say that an object has no state any more that a rank may join with, although others may still refer to it."""
    _registry.ended.update(name for name, reference in _registry.sources.items() if reference() is source)


def _live_source(name: str) -> PeerState | None:
    """Return a registered object; None if there is none, or it has ended."""
    reference = _registry.sources.get(name)
    return None if reference is None or name in _registry.ended else reference()


def collect_state() -> dict[str, Mapping[str, Any] | None]:
    """Return the state of every object that was registered; None of those that have ended."""
    live = {name: _live_source(name) for name in _registry.sources}
    return {name: None if source is None else source.state_dict() for name, source in live.items()}


def load_state(states: Mapping[str, dict[str, Any] | None]) -> None:
    """Load what `collect_state` returned on another rank; state of objects that are not registered yet waits.

    Raises:
        ConfigError: If an object of this rank has none there: the script is at another place.
    """
    _check_all_shared(states)
    for name, state in states.items():
        source = _live_source(name)
        if state is None:
            continue
        if source is None:
            _registry.waiting[name] = state
        else:
            source.load_state_dict(state)


def _check_all_shared(states: Mapping[str, dict[str, Any] | None]) -> None:
    def unshared() -> list[str]:
        return [name for name in _registry.sources if states.get(name) is None and _live_source(name) is not None]

    if not unshared():
        return
    gc.collect()  # what only a ring of references keeps has ended on the other ranks, too
    for name in unshared():
        kind, _, index = name.rpartition("/")
        others = max((int(each.rpartition("/")[2]) for each in states if each.startswith(f"{kind}/")), default=-1)
        raise ConfigError(
            f"this rank joins a job with its {ordinal(int(index) + 1)} {kind}, which the other ranks "
            f"{'have ended' if name in states else 'have not begun'}"
            f"{f': they have made {others + 1}' if others > int(index) else ''}. A rank that joins runs the script "
            "from its start, so it can join in the first training of a script only. Train once in a job, and start "
            "another job for the next training."
        )


def ordinal(number: int) -> str:
    """Return a number as text that says a place: 1st, 2nd, 3rd, 4th."""
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
