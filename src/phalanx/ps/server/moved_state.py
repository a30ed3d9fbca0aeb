"""`state_of`: what the servers of a job had beside their tables, for another number of servers (pure).

A state is what `ServerState.to_json` returns, with `saving` of the `SnapshotService` and `unanswered` of the `Service`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.ps.stores.batch_leases import BatchLeases
from phalanx.ps.stores.leases import Leases

_State = Mapping[str, Any]


def difference(states: Sequence[_State]) -> str:
    """Return what the servers do not agree on, or have not finished; empty where they stopped at one moment."""
    for part, value_of in _SHARED.items():
        if any(value_of(state) != value_of(states[0]) for state in states):
            return part
    if any(state["withheld"] for state in states):
        return "a lost worker, of whom they are being told"
    if any(state["unanswered"] for state in states):
        return "a change that is done and not answered yet"  # the worker would ask the new servers for it again
    return ""


_SHARED: dict[str, Callable[[_State], Any]] = {
    "the workers' pushes": lambda state: state["clocks"],
    "the tables": lambda state: sorted(spec["name"] for spec in state["specs"]),
    "the workers' processes": lambda state: sorted((c["client"], c["worker"]) for c in state["clients"]),
    "the days of tables that have ended": lambda state: state["days"],
    "the snapshots that fill tables": lambda state: state["saving"]["sources"],
}
"""What is the same on all servers between two requests that all of them get."""


def state_of(server: int, states: Sequence[_State]) -> dict[str, Any]:
    """Return the state of one of the new servers.

    Args:
        server: Its number.
        states: Those of the servers there were, by number, without a `difference`.
    """
    first, is_first = states[0], server == 0
    names = [spec["name"] for spec in first["specs"]]
    counts = {name: list(map(sum, zip(*(state["counts"][name] for state in states), strict=True))) for name in names}
    pushes = [(worker, push) for state in states for worker, push in state["first_pushes"].items()]
    return {
        "specs": first["specs"],
        "counts": counts if is_first else {},
        # Their requests to this server are numbered from 1.
        "clients": [{**client, "last": 0, "reply": {}} for client in first["clients"]],
        "clocks": first["clocks"],
        "leases": first["leases"] if is_first else Leases().to_json(),
        "batch_leases": first["batch_leases"] if is_first else BatchLeases().to_json(),
        "days": first["days"],
        # A server may have counted an earlier process's last push that another had not; it was made up for since.
        "first_pushes": dict(sorted(pushes, key=lambda of_worker: of_worker[1])),
        "withheld": [],
        # A delta says what changed by counts that each server keeps for itself.
        "saving": {"fulls": {}, "sources": first["saving"]["sources"]},
    }
