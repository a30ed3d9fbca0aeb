"""`ProbeChannel`: launchers of several nodes observe their ranks at one moment, and each learns what all of them saw.

What a node saw is plain values: `now` of its monotonic clock, its `patience_s`, and one entry of each of its processes.
Every launcher judges the same values by the same rules, so that all come to one verdict, and none decides for others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from phalanx.launch.hang.observe import Observation
from phalanx.launch.hang.words import MAX_FRAMES

UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a probe may raise that is none of this version."""

_LONGEST_S = 1e12
"""More than any clock shows: 30,000 years."""


class ProbeChannel(Protocol):
    """The way to the launchers of the other nodes. Its methods may be called from any thread."""

    def request_probe(self) -> None:
        """Have the launchers of all nodes observe their ranks, this one too."""

    def publish_probe(self, number: int, observed: dict[str, Any]) -> None:
        """Tell the others what was seen here in a probe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProbe:
    """What was seen of all processes of a job at one moment."""

    observations: Sequence[Observation]
    patience_s: float
    """How long a wait lasts at least that is worth a report, to the node that is most patient."""


def probe_to_json(observations: Sequence[Observation], patience_s: float) -> dict[str, Any]:
    """Return what this node saw, for the others; of a stack no more than a report shows."""
    short = [
        replace(each, location=replace(each.location, frames=each.location.frames[:MAX_FRAMES]))
        for each in observations
    ]
    return {"now": time.monotonic(), "patience_s": patience_s, "processes": [each.to_json() for each in short]}


def merge_probes(nodes: Sequence[dict[str, Any]]) -> JobProbe:
    """Return what all nodes saw together, in this node's time.

    Raises:
        ValueError: If it is nothing that a launcher of this version wrote; so may the other errors of `UNREADABLE`.
    """
    now = time.monotonic()
    observations = [
        Observation.from_json(process, shift_s=now - float(node["now"]))
        for node in nodes
        for process in node["processes"]
    ]
    patience_s = max((float(node["patience_s"]) for node in nodes), default=0.0)
    values = [observation.to_json() for observation in observations]
    # Half a pair of surrogates can be neither judged nor shown.
    json.dumps(values, ensure_ascii=False).encode()
    _check_times([*values, patience_s])
    return JobProbe(observations=observations, patience_s=patience_s)


def _check_times(values: Any) -> None:
    """Raise ValueError for numbers with a point, at any depth, that no clock shows: differences may have no end."""
    if isinstance(values, float) and not abs(values) < _LONGEST_S:
        raise ValueError(f"{values!r} seconds")
    if isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            _check_times(value)
