"""`ReplicaRecord`: over what the global batches of a run are split, as its checkpoints hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer

import phalanx.comm.context as context_of
from phalanx.comm.context import Context
from phalanx.errors import DataError
from phalanx.parallel.data.replicas.replica_sums import adds_up_in_tree
from phalanx.parallel.session import accumulation_of, applied_to, list_applied, session
from phalanx.plan.mesh import Position
from phalanx.plan.rules.mesh import CONTEXT_AXIS


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """Over what the global batches of a run were split."""

    count: int
    """Logical replicas, or without them ranks that read their own samples."""

    threads: int
    """With how many threads each computed."""

    is_asked: bool
    """Whether logical replicas were asked for: their random numbers are seeded; those of ranks continue a state."""

    obstacle: str | None = None
    """Why the run cannot be continued as so many replicas of fewer ranks; None if it can, or if that is not known."""

    has_means: bool = False
    """Whether the loop averages over the ranks at its batches, so that all have to make equally many passes."""

    rounding: str | None = None
    """What of its sums replicas would round otherwise; None if nothing."""

    index: int | None = None
    """Which of the ranks, or groups of ranks, that read samples of their own the one was that saved it."""

    labels_per_row: int | None = None
    """By what replicas divide means over labels; None where no loss was one."""

    @classmethod
    def of(cls, context: Context, optimizer: Optimizer | None) -> ReplicaRecord:
        """Return that of this run."""
        replicas, threads, readers = context.replicas, torch.get_num_threads(), context.readers
        has_means = session.has_means_in_loop
        if replicas is None:
            obstacle, rounding = _obstacle(context, optimizer), _rounding(context)
            return cls(readers.count, threads, False, obstacle, has_means, rounding, readers.index)
        return cls(
            *(replicas.count, threads, replicas.streams is None),
            has_means=has_means,
            index=readers.index,
            labels_per_row=replicas.labels_per_row,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any], where: object) -> ReplicaRecord:
        """Return what `values` returned, of the checkpoint `where`.

        Raises:
            DataError: If it is something else.
        """
        count, threads, is_asked = values.get("count"), values.get("threads"), values.get("is_asked")
        obstacle, rounding, has_means = values.get("obstacle"), values.get("rounding"), values.get("has_means", False)
        index, labels = values.get("index"), values.get("labels_per_row")
        are_counts = all(type(number) is int and number > 0 for number in (count, threads))
        if (
            not are_counts
            or not all(type(answer) is bool for answer in (is_asked, has_means))
            or not all(isinstance(why, str | None) for why in (obstacle, rounding))
            or not (index is None or (type(index) is int and index >= 0))
            or not (labels is None or (type(labels) is int and labels > 0))
        ):
            raise DataError(
                f"{where} says of its logical replicas {dict(values)!r}, which no save writes. Take another copy."
            )
        counts = cast(int, count), cast(int, threads), cast(bool, is_asked)
        return cls(*counts, obstacle, has_means, rounding, index, labels)

    def values(self) -> dict[str, Any]:
        """Return it as plain numbers and text."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def streams_of(context: Context) -> dict[str, Any] | None:
    """Return the random numbers of this rank's replicas, where they continue from a state."""
    streams = None if context.replicas is None else context.replicas.streams
    return None if streams is None else {str(replica): state.to_dict() for replica, state in streams.states().items()}


def ranks_of_part(indexes: Sequence[int | None], part: int) -> dict[int, int]:
    """Return, by share of a batch, the rank with a place in the group that computed it, of those that saved.

    Args:
        indexes: By rank, which share it read; None in checkpoints of versions without groups, of a rank each.
        part: The place.
    """
    groups: dict[int, list[int]] = {}
    for rank, index in enumerate(indexes):
        groups.setdefault(rank if index is None else index, []).append(rank)
    return {index: ranks[part] for index, ranks in groups.items() if part < len(ranks)}


def part_of_group() -> int:
    """Return the place of this rank among those that compute its share of a batch together."""
    for applied in list_applied():
        position = Position(applied.plan.mesh, context_of.current().rank)
        return position.index({axis.name for axis in applied.plan.mesh} - set(applied.plan.step.batch_axes))
    return 0


def _obstacle(context: Context, optimizer: Optimizer | None) -> str | None:
    """Return what this run does that replicas which come one after the other cannot; None if nothing is seen."""
    if bool(session.has_label_weights):
        return "its loss is a mean over labels that count, whose weight all replicas have to know before the first"
    if context.split is not None:
        return 'balance="samples" splits global batches by the speed of ranks'
    record = None if optimizer is None else session.optimizers.get(optimizer)
    models = [] if record is None else [applied_to(model) for model in record.models]
    reducers = [applied.reducer for applied in models if applied is not None and applied.reducer is not None]
    if optimizer is None or record is None or not reducers:
        return None
    if record.has_closure:
        return "its optimizer computes gradients in a closure, and cannot wait for those of all replicas"
    if not record.updates:
        return session.loaded_obstacle
    merge = accumulation_of(optimizer)
    if merge is not None and merge.held:
        return f"gradients of {merge.held} batches of an update that is not complete are those of its ranks"
    before, passes_before = record.given_before
    batches, passes = context.batches.trained - before, context.batches.passes - passes_before
    updates, each = record.updates, 1 if merge is None else merge.steps
    backward = {reducer.steps for reducer in reducers}
    if backward != {updates} or not 0 <= batches - updates * each < max(passes, 1):  # a pass may be left after a batch
        return (
            f"its loop made {updates} updates of {batches} batches and {max(backward)} backward passes, and replicas "
            "take one of each"
        )
    return None


def _rounding(context: Context) -> str | None:
    """Return which sums of this run, which has no replicas, follow another order than those of replicas would."""
    if not context.is_distributed:
        return None
    ranks, group = context.readers.count, context.world_size // context.readers.count
    if not adds_up_in_tree(None, torch.empty(0, device=context.device)):
        return "its ranks were not added up in a fixed tree, which shared memory does"
    if any(applied.is_sharded for applied in list_applied()):
        if ranks & ranks - 1:
            return "torch divides the gradients of sharded parameters after it has added them up by rank"
        if session.has_norms_of_shards:
            return "norms of sharded parameters were added up by rank"
    parts = [axis for applied in list_applied() for axis in applied.plan.mesh if axis.name == CONTEXT_AXIS]
    if any(axis.size & axis.size - 1 for axis in parts) and group > 1:
        return "ranks that held parts of a sequence were no branch of the fixed tree"
    return None
