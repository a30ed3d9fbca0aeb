"""`furthest_steps`: the moment at which all participants of a snapshot can stop, by the pushes of each worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEFT = 2**53
"""The step of a worker that left: as many pushes as anyone can ask for."""


def furthest_steps(states: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the steps, by worker, at which all participants can stop.

    In mode `sync` all stop behind the last step of the worker that saves: it makes no further one meanwhile, and its
    dense parameters are those after that step. If it is none of those that train, the step under way ends.
    """
    furthest = [max(steps) for steps in zip(*(state["steps"] for state in states), strict=True)]
    live = [steps for steps in furthest if steps < LEFT]
    if states[0].get("mode") != "sync" or not live:
        return furthest
    worker = states[0]["worker"]
    last = furthest[worker] if worker is not None and furthest[worker] < LEFT else max(live)
    return [last if steps < LEFT else LEFT for steps in furthest]
