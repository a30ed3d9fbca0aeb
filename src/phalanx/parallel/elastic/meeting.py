"""`await_next_view`: what members of an epoch do before they continue: tell their progress, form groups, hand on state.

Each fails with `PeerLostError` where a further member is lost; `recovery` then begins again with the next view.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from phalanx.cluster.view import View
from phalanx.comm import process_group
from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.context import Context
from phalanx.comm.elastic.membership import MembershipClient
from phalanx.comm.groups import name_axes
from phalanx.comm.waits.timeouts import collective_timeout
from phalanx.errors import PeerLostError
from phalanx.parallel.data.replicas.replica_round import gradient_group
from phalanx.parallel.elastic.peer_state import receive_state, send_state
from phalanx.parallel.elastic.progress import Agreement, MemberProgress
from phalanx.parallel.session import session
from phalanx.plan.value import Axis

logger = logging.getLogger("phalanx.parallel")


def await_next_view(membership: MembershipClient, failure: PeerLostError | None) -> View:
    """Return the view of those that are left.

    Raises:
        SystemExit: If this rank leaves the job.
        PeerLostError: If the launcher sends no view.
    """
    assert membership.view is not None
    view = membership.await_newer(membership.view.epoch)
    if view is None:
        raise failure or PeerLostError("the launcher sent no view of the members that are left")
    leave_unless_in(view, membership)
    return view


def leave_unless_in(view: View, membership: MembershipClient) -> None:
    """End this process well if a view is without it."""
    if membership.id not in view.ids:
        logger.info("this rank leaves the job: %s", view.reason)
        raise SystemExit(0)


def exchange_progress(
    mine: MemberProgress, membership: MembershipClient, view: View, attempt: int
) -> list[MemberProgress]:
    """Return the progress of every member of a view, by rank. Collective.

    A member may be in the middle of its computation; the launcher says whether it is alive.
    """
    if len(view.members) == 1:
        return [mine]
    store = process_group.store_of(view, f"progress/{attempt}")
    store.set(membership.id, mine.to_json())
    process_group.await_members(store, view.ids, view, collective_timeout().total_seconds())
    return [MemberProgress.from_json(store.get(id)) for id in view.ids]


def form_groups(
    context: Context, view: View, everyone: Sequence[MemberProgress], agreement: Agreement, attempt: int
) -> None:
    """Form the groups of those that continue now, and give those of them that join the state of another."""
    context.take_view(view.part(agreement.members), attempt)
    use_mesh_of(context)
    if len(agreement.members) > 1:
        gradient_group(context)
    joiners = [rank for rank, index in enumerate(agreement.members) if everyone[index].is_joining]
    source = agreement.members.index(agreement.source)
    if context.rank in joiners:
        receive_state(source)
    elif context.rank == source:
        for rank in joiners:
            send_state(rank)


def use_mesh_of(context: Context) -> None:
    """Let the Plans of distributed models, which split batches over all ranks, be of as many ranks as there are now."""
    for record in session.models.values():
        if record.applied is not None:
            mesh = (Axis(name=record.applied.plan.step.batch_axes[0], size=context.world_size),)
            record.applied = replace(record.applied, plan=record.applied.plan.model_copy(update={"mesh": mesh}))
            name_axes({axis.name: (None, axis.size) for axis in mesh})


def rows_of_replica(context: Context, replicas: Replicas) -> int:
    """Return how many samples of a full global batch are one replica's; 0 where no loader of ours gave them out."""
    return 0 if context.rows_for is None else context.rows_for(replicas.count) // replicas.count


def report_epoch(
    context: Context,
    membership: MembershipClient,
    replicas: Replicas,
    *,
    step: int,
    waited_s: float,
    lost: Sequence[str],
    new: Sequence[str],
    redone: int,
) -> None:
    """Tell the launcher that this rank continues in the view in use, and whoever reads the log.

    Args:
        context: The rank.
        membership: Its launcher's.
        replicas: Who holds which.
        step: Updates of the job.
        waited_s: How long this rank stood still.
        lost: Members that were lost.
        new: Members that joined.
        redone: Samples that are computed here and had been computed.
    """
    view = membership.view
    assert view is not None
    membership.send(
        "joined",
        epoch=view.epoch,
        step=step,
        seconds=round(waited_s, 4),
        redone=redone,
        lost=list(lost),
        new=list(new),
    )
    if context.rank == 0:
        log = logger.warning if lost else logger.info
        log(
            "membership epoch %d: %d ranks, after %s; this rank waited %.2f s, replicas of each rank: %s",
            view.epoch,
            len(view.members),
            view.reason or "a change",
            waited_s,
            ", ".join(str(len(local)) for local in replicas.by_rank),
        )
