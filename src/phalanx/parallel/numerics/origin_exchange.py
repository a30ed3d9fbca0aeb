"""`OriginExchange`: tell the other ranks what was first not finite on this one, and hear which came earliest."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.parallel.numerics.origin import Origin

logger = logging.getLogger("phalanx.parallel")

OTHERS_S = 10.0
"""Seconds in which other ranks, all together, may say what they found in a step that ends the job."""

LEFT_OUT_S = 5.0
"""The same for a step that is left out; shorter than what counts as a hang, for the job continues."""


class OriginExchange:
    """Compares what the ranks found through the job's store, in no collective: not every rank may come."""

    def __init__(self) -> None:
        self._apart: set[int] = set()
        """Ranks that took a step which this one left out."""

    def earliest(self, origin: Origin, step: int, part: str = "") -> tuple[int, Origin]:
        """Return the earliest of what the ranks found, and its rank; the same on all ranks that answer in time."""
        answers = self._answers(origin, f"{step}/{part}", _others(), OTHERS_S)
        return _earliest(answers)

    def earliest_of_left_out(self, origin: Origin, step: int) -> tuple[int, Origin]:
        """Return the same of a step that is left out, by all ranks if they share their gradients.

        Ranks that do not leave it out say nothing. They are waited for once.
        """
        ranks = [rank for rank in _others() if rank not in self._apart]
        answers = self._answers(origin, f"{step}/left_out", ranks, LEFT_OUT_S)
        silent = [rank for rank in ranks if rank not in answers]
        if silent:
            self._apart.update(silent)
            logger.warning(
                "step %d was left out on rank %d, as its scaled gradients overflowed, and within %g s not on rank%s %s "
                "(not waited for again). Ranks that train one model must leave out the same steps, or their weights "
                "part: let DistributedDataParallel average the gradients, or do it before scaler.step().",
                step,
                dist.get_rank(),
                LEFT_OUT_S,
                "s" if len(silent) > 1 else "",
                ", ".join(map(str, silent)),
            )
        return _earliest(answers)

    def _answers(self, origin: Origin, key: str, others: Iterable[int], within_s: float) -> dict[int, Origin]:
        if not dist.is_initialized():
            return {0: origin}
        store: Any = dist.distributed_c10d._get_default_store()
        rank = dist.get_rank()
        store.set(f"phalanx/not_finite/{key}/{rank}", json.dumps(origin.to_json()))
        answers, deadline = {rank: origin}, time.monotonic() + within_s
        for other in others:
            answer = f"phalanx/not_finite/{key}/{other}"
            if _comes(store, answer, deadline):
                answers[other] = Origin.from_json(json.loads(store.get(answer)))
        return answers


def _comes(store: Any, key: str, deadline: float) -> bool:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return bool(store.check([key]))
    try:
        store.wait([key], timedelta(seconds=left_s))
    except RuntimeError:  # that rank saw nothing, or it is gone
        return False
    return True


def _others() -> list[int]:
    if not dist.is_initialized():
        return []
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def _earliest(answers: dict[int, Origin]) -> tuple[int, Origin]:
    first = min(answers, key=lambda rank: (answers[rank].stage, rank))
    return first, answers[first]
