"""`give_first_values`: give tables the values of worker 0, where workers come and go and cannot wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.comm.agreement import share_from_first
from phalanx.comm.context import Context
from phalanx.errors import InternalError
from phalanx.ps.client.consistency import ConsistencyMode
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate


def give_first_values(
    context: Context, mode: ConsistencyMode, name: str, values: Callable[[], Sequence[TableUpdate]]
) -> None:
    """Return once the tables have their first values, which worker 0 gives.

    A worker that comes later waits for nothing. In sync mode they are a step, which every worker ends that is there
    from the start.

    Args:
        context: The job.
        mode: How this worker trains.
        name: Names what gets values among all that does.
        values: Returns the values of this worker, of the tables that have none; called on worker 0 alone.

    Raises:
        PeerLostError: If worker 0, or the one in its place, did not come in time.
    """
    store = mode.store
    if not isinstance(store, RemoteStore):
        raise InternalError("workers come and go beside servers, and this job has none")
    if context.rank == 0 and (updates := values()):
        mode.assign(updates)
    count = share_from_first(f"the first values of {name}", f"values of {name}", store.first_push + mode.pushes)
    while store.first_push + mode.pushes < count:
        mode.assign([])
