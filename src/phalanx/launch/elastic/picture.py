"""What nodes tell each other about the members: single facts, and the whole picture (pure)."""

from __future__ import annotations

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
    # Objects of JSON have no numbers as keys.
    "scale": lambda membership, targets, reason: membership.scale({node: n for node, n in targets}, reason),
}


def to_json(membership: Membership) -> dict[str, Any]:
    """Return all that a node knows."""
    return {
        "view": None if membership.view is None else membership.view.to_json(),
        "targets": list(membership.targets.items()),
        "members": [member.to_json() for member in membership.members.values()],
        "ready": membership.ready,
        "gone": membership.gone,
        "finished": sorted(membership.finished),
        "took_up": membership.took_up,
        "departures": membership.departures,
        "leaving": sorted(membership.leaving),
    }


def merge(membership: Membership, picture: dict[str, Any]) -> bool:
    """Add what another node knows; returns whether its view is newer."""
    own_epoch = -1 if membership.view is None else membership.view.epoch
    for member in picture["members"]:
        membership.add(Member(**member))
    for member_id in picture["finished"]:
        membership.finish(member_id)
    for member_id, reason in picture["gone"].items():
        membership.lose(member_id, reason)
    for member_id in picture["ready"]:
        membership.admit(member_id)
    for member_id, epoch in picture["took_up"].items():
        membership.take_up(member_id, epoch)
    for member_id, reason in picture["departures"].items():
        membership.depart([member_id], reason)
    is_newer = picture["view"] is not None and picture["view"]["epoch"] > own_epoch
    if is_newer:
        membership.targets = {node: count for node, count in picture["targets"]}
        membership.adopt(View.from_json(picture["view"]))
        ended = membership.gone.keys() | membership.finished
        membership.leaving |= set(picture["leaving"]) - ended
    return is_newer
