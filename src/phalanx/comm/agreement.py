"""Agree on JSON values over the key-value store: `agree`, `share`, `barrier`; a mismatch is an error on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from phalanx.cluster.rendezvous import name_ranks
from phalanx.cluster.role.role import Role
from phalanx.comm import process_group
from phalanx.comm.crossed import Crossing
from phalanx.comm.process_group import JobMembership
from phalanx.comm.store import open_store
from phalanx.errors import ConfigError, PeerLostError

logger = logging.getLogger("phalanx.comm")

SAY_EVERY_S = 5.0
"""Seconds between two lines that say whom this rank waits for."""

LOOK_EVERY_S = 0.5
"""Seconds between two looks at what other ranks wait in."""

DEFAULT_TIMEOUT_S = 300.0
"""Seconds to wait for the slowest rank: it may still be reading data or building a model."""

_SHOWN_CHARACTERS = 120


def agree(name: str, value: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Check that all ranks hold the same value.

    Collective: every rank calls it in the same order. Free with one process. Values travel as JSON, and only when they
    differ; else a digest does.

    Args:
        name: What the value is, for the message ("plan", "batch size").
        value: JSON-able value.
        timeout_s: Seconds to wait for the slowest rank.

    Raises:
        ConfigError: If values differ, on all ranks alike; names the first difference and who has what.
            Or if another rank waits in a collective for this one meanwhile; names both calls.
        PeerLostError: If a rank did not come in time; names it.
    """
    text = _to_json(name, value)
    meeting = _meeting()
    if meeting is None:
        return
    call = _next_call(meeting)
    digest = f"{name} {hashlib.sha256(text.encode()).hexdigest()}"
    digests = _exchange(meeting, f"{call}/digest", digest, name, timeout_s)
    names = [d.rpartition(" ")[0] for d in digests]
    if len(set(names)) > 1:
        raise ConfigError(
            f"Ranks are at different points of the script: {_who_has(names)}. "
            "Every rank must make the same calls in the same order; look for an `if rank == ...` around one of them."
        )
    if len(set(digests)) > 1:
        values = [json.loads(v) for v in _exchange(meeting, f"{call}/value", text, name, timeout_s)]
        raise ConfigError(_difference(name, values))


def share(name: str, value: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """Return rank 0's value on every rank.

    Collective: every rank calls it in the same order. Other ranks' values are not looked at.

    Args:
        name: What the value is, for messages.
        value: JSON-able value on rank 0; ignored elsewhere.
        timeout_s: Seconds to wait for rank 0.

    Raises:
        PeerLostError: If rank 0 did not come in time.
    """
    meeting = _meeting()
    if meeting is None:
        return json.loads(_to_json(name, value))
    key = f"{_next_call(meeting)}/share"
    if meeting.role.rank == 0:
        meeting.store.set(key, _to_json(name, value))
    _await(meeting, [0], [key], name, timeout_s, _crossing(meeting, name))
    return json.loads(meeting.store.get(key))


def share_from_first(name: str, key: str, value: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """Return rank 0's value of `key` on every rank that asks.

    Not collective: rank 0 continues at once, other ranks wait for it alone, in any order among other calls and from any
    thread. The first value stays, also for a rank that is started again.

    Args:
        name: What the value is, for messages.
        key: Names the value among all that are shared so; each is shared once.
        value: JSON-able value on rank 0; ignored elsewhere.
        timeout_s: Seconds to wait for rank 0.

    Raises:
        PeerLostError: If rank 0 did not come in time.
    """
    meeting = _meeting() or _first_meeting()
    if meeting is None:
        return value
    key = f"first/{key}"
    if meeting.role.rank == 0:
        return json.loads(meeting.store.set_once(key, _to_json(name, value)))
    _await(meeting, [0], [key], name, timeout_s)
    return json.loads(meeting.store.get(key))


def barrier(name: str = "barrier", *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Wait until every rank is here; who is missing is named every 5 s.

    Collective over the workers. Free with one process.

    Args:
        name: What the caller calls this, for messages.
        timeout_s: Seconds to wait for the slowest rank.

    Raises:
        PeerLostError: If a rank did not come in time; names it.
    """
    meeting = _meeting()
    if meeting is not None:
        _exchange(meeting, f"{_next_call(meeting)}/barrier", "here", name, timeout_s)


def leave() -> None:
    """Tell the other ranks that this one makes no more calls, so that nobody waits for it. Free without others."""
    meeting = _meeting()
    if meeting is not None:
        with contextlib.suppress(PeerLostError):  # the store has ended: nobody is left to tell
            meeting.store.set(_departure_key(meeting.role.rank), "")


def stay_out(role: Role) -> None:
    """Tell the workers that met without this one, because it was started again, that it makes none of their calls.

    Raises:
        PeerLostError: If the job's store does not answer.
    """
    store = open_store(role, process_group.FIRST_PREFIX, process_group.rendezvous_timeout_s())
    store.set(
        _departure_key(role.rank),
        "It was started again alone, and takes part in no collective call any more. Leave this one out where workers "
        "may be started again.",
    )


def _departure_key(rank: int) -> str:
    return f"left/{rank}"


def _meeting() -> JobMembership | None:
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return process_group.meeting()


def _first_meeting() -> JobMembership | None:
    """Return the meeting of a worker that is in no group: what the others shared in the job's store is known to all."""
    role = process_group.outsider()
    if role is None:
        return None
    return JobMembership(role, open_store(role, process_group.FIRST_PREFIX, process_group.rendezvous_timeout_s()), [])


def _next_call(meeting: JobMembership) -> str:
    meeting.calls += 1
    return f"call/{meeting.calls}"


def _to_json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError as error:
        raise ConfigError(f"{name} must be made of JSON values to be compared across ranks: {error}.") from None


def _exchange(meeting: JobMembership, key: str, mine: str, name: str, timeout_s: float) -> list[str]:
    role, store = meeting.role, meeting.store
    store.set(f"{key}/{role.rank}", mine)
    keys = [f"{key}/{r}" for r in range(role.world_size)]
    _await(meeting, range(role.world_size), keys, name, timeout_s, _crossing(meeting, name))
    return [store.get(k) for k in keys]


def _crossing(meeting: JobMembership, name: str) -> Crossing:
    return Crossing(process_group.describe_rank(meeting.role.rank), name)


def _await(
    meeting: JobMembership,
    ranks: Sequence[int],
    keys: list[str],
    name: str,
    timeout_s: float,
    crossing: Crossing | None = None,
) -> None:
    start, store = time.monotonic(), meeting.store
    next_line = start + min(SAY_EVERY_S, timeout_s)
    pause_s = SAY_EVERY_S if crossing is None else LOOK_EVERY_S

    def absent() -> list[int]:
        return [r for r, key in zip(ranks, keys, strict=True) if not store.has([key])]

    while not store.wait(keys, max(0.0, min(pause_s, next_line - time.monotonic()))):
        if crossing is not None:
            crossing.look()
        if time.monotonic() < next_line:
            continue
        next_line = min(time.monotonic() + SAY_EVERY_S, max(start + timeout_s, time.monotonic()))
        waited_s = time.monotonic() - start
        left = {r for r in absent() if store.has([_departure_key(r)])}
        # A rank says that it leaves after its last call, so who is still absent now will not come.
        if gone := left.intersection(absent()):
            raise _not_coming(
                meeting, gone, name, waited_s, store.get(_departure_key(min(gone))) or _look("It has ended")
            )
        if missing := absent():
            if waited_s >= timeout_s:
                raise _not_coming(meeting, missing, name, waited_s, _look("It has ended or hangs"))
            came = sorted({*ranks} - {*missing})
            so_far = f", which only {name_ranks(came)} called so far: call it on all ranks" if came else ""
            logger.warning("waiting for %s since %.0f s, at %r%s", _describe_ranks(missing), waited_s, name, so_far)


def _not_coming(meeting: JobMembership, ranks: Iterable[int], name: str, waited_s: float, why: str) -> PeerLostError:
    return PeerLostError(
        f"{process_group.describe_rank(meeting.role.rank)} waited {waited_s:.0f} s for {_describe_ranks(ranks)}, which "
        f"did not come to {name!r}. {why}"
    )


def _look(fate: str) -> str:
    return (
        f"{fate}: its log says where. Every rank must make the same calls: look for an `if rank == ...` around this "
        "one."
    )


def _describe_ranks(ranks: Iterable[int]) -> str:
    return "; ".join(process_group.describe_rank(r) for r in sorted(ranks))


def _who_has(values: Sequence[Any]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        shown = value if isinstance(value, str) else "nothing" if value is None else json.dumps(value)
        groups.setdefault(shown, []).append(rank)
    short = (k if len(k) <= _SHOWN_CHARACTERS else k[:_SHOWN_CHARACTERS] + "..." for k in groups)
    return "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in zip(short, groups.values(), strict=True))


def _difference(name: str, values: Sequence[Any]) -> str:
    path, values_there = first_difference(values)
    where = f"{name}{path}" if path else name
    return (
        f"{where} must be the same on all ranks, found {_who_has(values_there)}. Start every rank with the same "
        "settings."
    )


def first_difference(values: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return the path of the first place where JSON values differ, and what each of them holds there.

    Args:
        values: One JSON value per rank, not all equal.

    Returns:
        A path such as `.step.accumulate` or `[2]`, empty for the whole value; and the values there by rank, None where
        a key is missing.
    """
    leaves = [dict(_leaves(v, "")) for v in values]
    for path in dict.fromkeys(p for leaf in leaves for p in leaf):
        leaf_values = [leaf.get(path) for leaf in leaves]
        if any(f != leaf_values[0] for f in leaf_values):
            return path, leaf_values
    return "", list(values)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key in value:
            yield from _leaves(value[key], f"{path}.{key}")
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value
