"""`draw_faults`: random faults for jobs of `elastic_rank`, the same for the same seed."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from typing import Any

POINTS = (
    "load", "forward", "backward", "reduce", "commit", "committed", "optimizer", "updated", "step",
    "recover", "agreed", "formed", "recovered", "send", "sent", "receive", "received",
)  # fmt: skip
"""Where a rank may end: in its loop, and in what the others do because another one ended or joins."""

SHARDING = ("share", "shared", "reshard", "resharded")
"""More of them, where ranks shard optimizer state."""

TWO_MODELS = ("between",)
"""More of them, where a step is of two optimizers."""

ANYWHERE = (
    "recover", "agreed", "formed", "recovered", "send", "sent", "receive", "received",
    "reshard", "resharded", "save", "write", "written", "saved",
)  # fmt: skip
"""Points that a rank reaches only after the membership has changed, or when a checkpoint is due."""


def draw_faults(
    seed: int,
    count: int,
    *,
    ranks: int,
    first: int,
    every: int,
    stops: float = 0.25,
    points: Sequence[str] = POINTS,
) -> list[dict[str, Any]]:
    """Return orders for one job.

    Args:
        seed: Decides.
        count: How many.
        ranks: Most ranks of the job.
        first: Update of the first.
        every: Updates between two.
        stops: Share of SIGSTOP, the others being SIGKILL.
        points: Where they may happen.
    """
    generator = random.Random(seed)
    orders: list[dict[str, Any]] = []
    update = first
    while len(orders) < count:
        pair = generator.random() < 0.3 and count - len(orders) > 1
        chosen = generator.sample(range(ranks), 2 if pair else 1)
        for rank in chosen:
            point = generator.choice(points)
            anywhere = point in ANYWHERE
            orders.append(
                {
                    "update": update,
                    "rank": None if anywhere else rank,
                    # The last rank that has the state stays, whatever else happens.
                    "ranks": 3 if pair or anywhere else max(rank + 1, 2),
                    "point": point,
                    "signal": int(signal.SIGSTOP if generator.random() < stops else signal.SIGKILL),
                    "delay": generator.choice([0.0, 0.0, generator.uniform(0.0, 0.02)]),
                }
            )
        update += every + generator.randrange(every)
    return orders
