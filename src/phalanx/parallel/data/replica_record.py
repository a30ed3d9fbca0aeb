"""`ReplicaRecord`: over what the global batches of a run are split, as its checkpoints hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer

from phalanx.comm.context import Context
from phalanx.errors import DataError
from phalanx.parallel.data.replica_sums import adds_up_in_tree
from phalanx.parallel.session import applied_to, list_applied, session


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """Over what the global batches of a run were split."""

    count: int
    """Logical replicas, or without them ranks that read their own samples."""

    threads: int
    """With how many threads each computed."""

    is_asked: bool
    """Whether logical replicas were asked for: their random numbers are seeded, those of ranks go on from a state."""

    obstacle: str | None = None
    """Why the run cannot be continued as so many replicas of fewer ranks; None if it can, or if that is not known."""

    has_means: bool = False
    """Whether the loop averages over the ranks at its batches, so that all have to make equally many passes."""

    rounding: str | None = None
    """What of its sums replicas would round otherwise; None if nothing."""

    @classmethod
    def of(cls, context: Context, optimizer: Optimizer | None) -> ReplicaRecord:
        """Return that of this run."""
        replicas, threads = context.replicas, torch.get_num_threads()
        if replicas is None:
            obstacle, rounding = _obstacle(context, optimizer), _rounding(context)
            return cls(context.readers.count, threads, False, obstacle, session.has_means_in_loop, rounding)
        return cls(replicas.count, threads, replicas.streams is None, has_means=session.has_means_in_loop)

    @classmethod
    def read(cls, values: Mapping[str, Any], where: object) -> ReplicaRecord:
        """Return what `values` returned, of the checkpoint `where`.

        Raises:
            DataError: If it is something else.
        """
        count, threads, is_asked = values.get("count"), values.get("threads"), values.get("is_asked")
        obstacle, rounding, has_means = values.get("obstacle"), values.get("rounding"), values.get("has_means", False)
        are_counts = all(type(number) is int and number > 0 for number in (count, threads))
        if (
            not are_counts
            or not all(type(answer) is bool for answer in (is_asked, has_means))
            or not all(isinstance(why, str | None) for why in (obstacle, rounding))
        ):
            raise DataError(
                f"{where} says of its logical replicas {dict(values)!r}, which no save writes. Take another copy."
            )
        return cls(cast(int, count), cast(int, threads), cast(bool, is_asked), obstacle, has_means, rounding)

    def values(self) -> dict[str, Any]:
        """Return it as plain numbers and text."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def streams_of(context: Context) -> dict[str, Any] | None:
    """Return the random numbers of this rank's replicas, where they go on from a state."""
    streams = None if context.replicas is None else context.replicas.streams
    return None if streams is None else {str(replica): state.to_dict() for replica, state in streams.states().items()}


def _obstacle(context: Context, optimizer: Optimizer | None) -> str | None:
    """Return what this run does that replicas which come one after the other cannot; None if nothing is seen."""
    if bool(session.has_label_weights):
        return "its loss is a mean over labels that count, whose weight all replicas have to know before the first"
    if context.world_size != context.readers.count:
        return "ranks held parts of the model, each with random numbers of its own"
    if context.split is not None:
        return 'balance="samples" splits global batches by the speed of ranks'
    record = None if optimizer is None else session.optimizers.get(optimizer)
    models = [] if record is None else [applied_to(model) for model in record.models]
    reducers = [applied.reducer for applied in models if applied is not None and applied.reducer is not None]
    if not reducers or record is None:
        return None
    if record.has_closure:
        return "its optimizer computes gradients in a closure, and cannot wait for those of all replicas"
    if not record.updates:
        return session.loaded_obstacle
    before, passes_before = record.given_before
    batches, passes = context.batches.trained - before, context.batches.passes - passes_before
    updates = record.updates
    backward = {reducer.steps for reducer in reducers}
    if backward != {updates} or not 0 <= batches - updates < max(passes, 1):  # a pass may be left after a batch
        return (
            f"its loop made {updates} updates of {batches} batches and {max(backward)} backward passes, and replicas "
            "take one of each"
        )
    return None


def _rounding(context: Context) -> str | None:
    """Return which sums of this run, which has no replicas, follow another order than those of replicas would."""
    if any(applied.is_sharded for applied in list_applied()):
        return "torch adds up and divides the gradients of sharded parameters by rank"
    if context.is_distributed and not adds_up_in_tree(None, torch.empty(0, device=context.device)):
        return "its ranks were not added up in a fixed tree, which shared memory does"
    return None
