"""What nodes tell each other about the members: single facts, and the whole state (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from phalanx.cluster.view import Member, View
from phalanx.launch.elastic.membership import Membership


def record_fact(membership: Membership, fact: list[Any]) -> bool:
    """Record `[what, *values]`, as it came from another node or happened here; returns what the method returns.

    Raises:
        KeyError: If there is no such fact.
    """
    what, *values = fact
    return bool(_FACTS[what](membership, *values))


_FACTS: dict[str, Any] = {
    "add": lambda membership, member: membership.add(Member(**member)),
    "admit": lambda membership, member_id: membership.admit(member_id),
    "lose": lambda membership, member_id, reason: membership.lose(member_id, reason),
    "finish": lambda membership, member_id: membership.finish(member_id),
    "depart": lambda membership, member_ids, reason: membership.depart(member_ids, reason),
    "scale": lambda membership, *change: _scale(membership, *change),
    "drain": lambda membership, launch: membership.drain(launch),
}


def to_json(membership: Membership) -> dict[str, Any]:
    """Return all that a node knows."""
    return {
        "view": None if membership.view is None else membership.view.to_json(),
        "targets": list(membership.targets.items()),
        "version": membership.version,
        "surplus": sorted(membership.surplus),
        "draining": sorted(membership.draining),
        "members": [member.to_json() for member in membership.members.values()],
        "ready": membership.ready,
        "gone": membership.gone,
        "finished": sorted(membership.finished),
        "took_up": membership.took_up,
        "departures": membership.departures,
        "leaving": sorted(membership.leaving),
    }


def merge(membership: Membership, state: dict[str, Any]) -> bool:
    """Add what another node knows; returns whether its view is newer."""
    own_epoch = -1 if membership.view is None else membership.view.epoch
    for member in state["members"]:
        membership.add(Member(**member))
    for member_id in state["finished"]:
        membership.finish(member_id)
    for member_id, reason in state["gone"].items():
        membership.lose(member_id, reason)
    for member_id in state["ready"]:
        membership.admit(member_id)
    for member_id, epoch in state["took_up"].items():
        membership.take_up(member_id, epoch)
    version, surplus = _version(state["version"]), set(state["surplus"])
    membership.adopt_targets(_targets(state["targets"]), surplus, version)
    for member_id, reason in state["departures"].items():
        # Who was to leave for older targets only may stay by now.
        if member_id not in surplus or version >= membership.version:
            membership.depart([member_id], reason)
    for launch in state["draining"]:
        membership.drain(launch)
    is_newer = state["view"] is not None and state["view"]["epoch"] > own_epoch
    if is_newer:
        membership.adopt(View.from_json(state["view"]))
        ended = membership.gone.keys() | membership.finished
        membership.leaving |= set(state["leaving"]) - ended
    return is_newer


def _scale(membership: Membership, targets: Iterable[tuple[int, int]], reason: str, version: tuple[int, int]) -> None:
    membership.scale(_targets(targets), reason, _version(version))


def _targets(values: Iterable[tuple[int, int]]) -> dict[int, int]:
    # Objects of JSON have no numbers as keys.
    return {int(node): int(count) for node, count in values}


def _version(values: tuple[int, int]) -> tuple[int, int]:
    number, node = values
    return int(number), int(node)
