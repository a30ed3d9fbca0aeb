"""`px.init` and the `Context` of a process: its role, rank, device, process group and current batch."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from phalanx.cluster.env.settings import warn_unsupported
from phalanx.cluster.role.role import Role
from phalanx.cluster.view import View
from phalanx.comm import agreement, process_group, threads
from phalanx.comm.batch.batches import Batches
from phalanx.comm.batch.passes import Passes
from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.batch.sample_split import SampleSplit
from phalanx.comm.batch.share import BatchShare as BatchShare
from phalanx.comm.elastic import membership
from phalanx.comm.elastic.membership import MembershipClient
from phalanx.comm.freed_memory import keep_freed_memory
from phalanx.comm.local.logging_setup import speak
from phalanx.errors import ConfigError, InternalError

logger = logging.getLogger("phalanx.comm")


@dataclass(frozen=True, slots=True)
class DataParallelRank:
    """Which rows of a global batch this rank reads, where several ranks may read the same (model parallel)."""

    index: int
    """Which share of the rows; ranks with the same index read the same."""

    count: int
    """Number of shares."""

    group: dist.ProcessGroup | None = None
    """One rank for each share, this one among them; None means all ranks. Sums over it count every row once."""

    replicas: int | None = None
    """Logical replicas over which training batches are split, a multiple or not of `count`; None for one each."""

    @property
    def shares(self) -> int:
        """Shares of a training batch: logical replicas, of which a rank may hold several."""
        return self.replicas or self.count


@dataclass(slots=True)
class Context:
    """One process's view of the job, made by `init` and shared by every part that runs in the process."""

    role: Role
    device: torch.device
    batches: Batches = field(default_factory=Batches, repr=False)
    """The batches that loaders gave out."""

    rows_for: Callable[[int], int] | None = field(default=None, repr=False)
    """Rows of a full global batch of the loader that dealt the last training batch, by the number of ranks that read;
    None when no loader of ours did."""

    ended_with: BatchShare | None = None
    """Share of the last batch of a training epoch that is over, until the next ends: what is measured after the loop
    is of that batch, while gradients of other data weigh the same on every rank."""

    owns_group: bool = field(default=False, repr=False)
    """Whether `shutdown` ends the process group (False when the script made its own)."""

    pid: int = field(default_factory=os.getpid, repr=False)
    """The process that is this rank: a child it forks is not."""

    mesh_readers: DataParallelRank | None = field(default=None, repr=False)
    """What the mesh of the Plan in use says of `readers`; None when every rank reads rows of its own."""

    replicas: Replicas | None = field(default=None, repr=False)
    """The logical replicas over which the Plan in use splits training batches; None when it asks for none."""

    recovery: Any = field(default=None, repr=False)
    """In an elastic job with logical replicas, the `parallel.elastic.recovery.ElasticRecovery` of this rank."""

    batch_source: Any = field(default=None, repr=False)
    """Where workers beside servers come and go, the `ps.client.leased_batches.LeasedBatches` of this worker."""

    split: SampleSplit | None = field(default=None, repr=False)
    """How many samples of each global batch each rank reads, where that follows their speeds; even when None."""

    passes: Passes = field(init=False, repr=False)
    """Forward and backward passes of distributed models, and the batch each is of."""

    def __post_init__(self) -> None:
        self.passes = Passes(self.batches)

    def take_view(self, view: View, attempt: int) -> None:
        """Become a member of another membership epoch of an elastic job. Collective over its members.

        Args:
            view: The members.
            attempt: How often its members have tried before.

        Raises:
            PeerLostError: If a member does not come; a later view tells who is left.
        """
        own = self._membership()
        own.use(view)
        rank, size = view.ids.index(own.id), len(view.members)
        node = view.members[rank].node
        local = [index for index, member in enumerate(view.members) if member.node == node]
        self.role = replace(
            self.role,
            rank=rank,
            world_size=size,
            local_rank=local.index(rank),
            local_world_size=len(local),
            worker_endpoints=(),
        )
        self.mesh_readers = DataParallelRank(rank, size, None, None if self.replicas is None else self.replicas.count)
        # Whoever joins waits until the others have finished a global batch; they are there, or lost.
        patience_s = process_group.rendezvous_timeout_s() if own.is_joining else process_group.REFORM_TIMEOUT_S
        process_group.reform(self.role, view, attempt, patience_s)
        self.owns_group = size > 1

    def _membership(self) -> MembershipClient:
        own = membership.current()
        if own is None:
            raise InternalError("a process outside of an elastic job cannot take up a view")
        return own

    def use_replicas(self, replicas: Replicas | None) -> None:
        """Split training batches over logical replicas from now on, or over ranks."""
        self.replicas = self.batches.replicas = replicas

    @property
    def batch(self) -> BatchShare | None:
        """Share of the batch in hand: of the last forward pass of a distributed model, or given out since.

        None when every rank counts the same, as between two epochs.
        """
        return self.batches.in_hand

    @batch.setter
    def batch(self, share: BatchShare | None) -> None:
        self.batches.in_hand = share

    @property
    def readers(self) -> DataParallelRank:
        """Which rows this rank reads."""
        return self.mesh_readers or DataParallelRank(self.rank, self.world_size)

    @property
    def rank(self) -> int:
        """Global rank of this process among the workers."""
        return self.role.rank

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.role.world_size

    @property
    def is_distributed(self) -> bool:
        """Whether there is anyone to talk to."""
        return self.role.world_size > 1


_current: Context | None = None


def init(role: Role | None = None, *, backend: str | None = None, timeout_s: float | None = None) -> Context:
    """Find out who this process is and meet the other ranks.

    Collective: every rank must call it; a second call returns the same Context. With one process nothing is started.

    Args:
        role: Who this process is; when omitted read from the environment, or, where no launcher wrote one, from the
            process group that the script made itself.
        backend: torch backend name; PHALANX_BACKEND, or `shm` on CPU and `cpu:shm,cuda:nccl` with CUDA, when omitted.
        timeout_s: Seconds to wait for the other ranks here; 60 when omitted. How long a later call may wait for them is
            PHALANX_COLLECTIVE_TIMEOUT_S.

    Raises:
        RoleError: If the environment is contradictory or incomplete; names the variables.
        PeerLostError: If a rank did not come in time; names the missing ranks.
    """
    global _current
    if _current is not None:
        return _current
    role = role or _detect()
    speak(role.rank)
    warn_unsupported()
    if role.is_worker:
        keep_freed_memory()
    device = process_group.pick_device(role)
    membership.connect()
    owns_group = process_group.start(role, backend=backend, timeout_s=timeout_s)
    threads.share_cores(role)
    if (outsider := process_group.outsider()) and not outsider.least_workers:
        agreement.stay_out(outsider)
    _current = Context(role=role, device=device, owns_group=owns_group)
    atexit.register(shutdown)
    return _current


def _detect() -> Role:
    role = Role.detect()
    if role.launcher != "none" or not dist.is_initialized():
        return role
    # Such a script starts its ranks itself, on this host (torch.multiprocessing.spawn).
    rank, size = dist.get_rank(), dist.get_world_size()
    return replace(role, rank=rank, world_size=size, local_rank=rank, local_world_size=size)


def current() -> Context:
    """Return the Context made by `init`.

    Raises:
        ConfigError: If `init` was not called.
    """
    if _current is None:
        raise ConfigError("Phalanx is not initialised in this process. Call phalanx.init() or fleet.init() first.")
    return _current


def use_batch(batch: Any) -> None:
    """Say which batch of a loader the forward passes that come are computed on.

    Needed where that cannot be seen: gradients weigh by the rows of the batch, and a model is called with other tensors
    than the loader gave out (`x.float()`, noise, augmented copies) while several batches are at hand, as in a loop that
    reads ahead. It holds until a loader gives out the next batch to train on, or the next call.

    Not collective.

    Args:
        batch: What the loader gave, or a tensor of it.

    Raises:
        ConfigError: If no loader of ours gave it out, or several batches are in it.
    """
    if not current().batches.use(batch):
        raise ConfigError(
            "use_batch was called with tensors that are of no batch of a ShardedLoader, or of several. Call it with "
            "what the loader gave out, before it is converted or copied."
        )


def is_initialized() -> bool:
    """Return whether `init` was called in this process."""
    return _current is not None


def shutdown() -> None:
    """Leave the job: end the process group that `init` made. Safe to call twice, and nothing in a forked child."""
    global _current
    if _current is None or _current.pid != os.getpid():
        return
    if _current.owns_group:
        agreement.leave()
        process_group.stop()
    membership.forget()
    _current = None
