"""`check_same_place`, `check_places`: ranks that add up gradients compute the same global batch.

Where ranks hold different numbers of logical replicas, a loop that leaves an epoch after so many of its own batches
leaves it at other global batches on other ranks. Collectives follow one another alike, so gradients of different global
batches would be added up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.comm.batch.replicas import LEAVE_BY_UPDATES, Replicas
from phalanx.comm.elastic.membership import wait_for
from phalanx.comm.groups import Group
from phalanx.errors import ConfigError

logger = logging.getLogger("phalanx.parallel")


def check_same_place(replicas: Replicas, group: Group, device: torch.device) -> None:
    """Raise unless the turns of all ranks are of one global batch. Collective, before gradients are sent.

    Args:
        replicas: Those of the job; a turn is on.
        group: The ranks that hold them.
        device: Where what travels lies.

    Raises:
        ConfigError: On all ranks; names the line at which this one left the epoch, if it did.
    """
    turn = replicas.turn
    epoch, position = (-1, -1) if turn is None else turn.place
    places = torch.tensor([epoch, position, -epoch, -position], device=device)
    wait_for(dist.all_reduce(places, dist.ReduceOp.MAX, group=group, async_op=True))
    last_epoch, last_position, first_epoch, first_position = places.tolist()
    if (last_epoch, last_position) == (-first_epoch, -first_position):
        return
    own = ", ".join(str(len(local)) for local in replicas.by_rank)
    left = f" This rank left an epoch at {replicas.left_at}." if replicas.left_at else ""
    raise ConfigError(
        f"the ranks compute different global batches: this one is in epoch {epoch}, before sample {position}, and "
        f"others between epoch {-first_epoch} and {last_epoch}, sample {-first_position} and {last_position}. Ranks "
        f"hold {own} logical replicas, so a loop that leaves an epoch after a number of its batches leaves it at other "
        f"global batches on each.{left} {LEAVE_BY_UPDATES}"
    )


def same_place(epoch: int, position: int) -> list[int]:
    """Return what ranks compare by its minimum over them: see `check_places`.

    Args:
        epoch: Of the global batch whose gradients this rank adds up.
        position: After it.
    """
    return [epoch, position, -epoch, -position]


def check_places(least: Sequence[int], replicas: Replicas) -> None:
    """Raise on all ranks alike if they have added up gradients of different global batches.

    Where ranks leave and join they find out as they agree to update, for they may come to hold other numbers of
    replicas at any time.

    Args:
        least: The minimum of `same_place` over the ranks.
        replicas: Those of the job.

    Raises:
        ConfigError: If they have.
    """
    first_epoch, first_position, last_epoch, last_position = least[0], least[1], -least[2], -least[3]
    if (first_epoch, first_position) == (last_epoch, last_position):
        return
    if replicas.left_at:
        logger.error("this rank left an epoch at %s", replicas.left_at)
    own = ", ".join(str(len(local)) for local in replicas.by_rank)
    raise ConfigError(
        f"the ranks compute different global batches: between epoch {first_epoch} and {last_epoch}, before sample "
        f"{first_position} and {last_position}. Ranks hold {own} logical replicas, so a loop that leaves an epoch "
        f"after a number of its batches leaves it at other global batches on each. {LEAVE_BY_UPDATES}"
    )
