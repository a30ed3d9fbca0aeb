"""`start`: create and destroy the default torch process group of a job: rendezvous, device, choice of backend."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from phalanx import __version__, accelerator
from phalanx.cluster import network
from phalanx.cluster.env.environment import split_endpoint
from phalanx.cluster.rendezvous import Announcement, Expected, meet
from phalanx.cluster.role.role import Role
from phalanx.cluster.view import View
from phalanx.comm import shared_memory
from phalanx.comm.elastic import membership
from phalanx.comm.store import JobStore, addresses_of, connect_store, open_store, probe
from phalanx.comm.waits.timeouts import collective_timeout
from phalanx.errors import ConfigError, PeerLostError, RoleError, did_you_mean
from phalanx.versions import HAS_NATIVE, WITHOUT_NATIVE

logger = logging.getLogger("phalanx.comm")

DEFAULT_TIMEOUT_S = 60.0
"""Seconds to wait for the other ranks unless PHALANX_RENDEZVOUS_TIMEOUT_S or the call says otherwise."""


@dataclass(slots=True)
class JobMembership:
    """What this process knows of the ranks it met."""

    role: Role
    store: JobStore
    peers: list[Announcement]
    """All ranks in order; empty when the script made the group itself."""

    calls: int = 0
    """Collective calls over the store so far; numbers their keys."""


_meeting: JobMembership | None = None
_outsider: Role | None = None
"""This worker beside servers, if it is in no group: it was started again, so the others' group continues, or fails,
without it; or workers come and go, and there is no group."""

_starts = 0
_backend: str | None = None
"""What carries the tensors of the group in use, for the groups of later membership epochs."""

_generation = 0

SUSPECT_EVERY_S = 0.1
"""How often a member that waits for others looks whether it has waited too long."""

REFORM_TIMEOUT_S = 10.0
"""Seconds to wait for the members of a membership epoch, which are alive when it begins."""

FIRST_PREFIX = "phalanx/0/0"
"""Where the store keeps what workers beside servers tell each other: they all met in their first life."""


def pick_device(role: Role) -> torch.device:
    """Return the device this process computes on and make it torch's current one.

    A worker takes the visible card of its local rank, or the one its rank table lists, or the only visible one
    (launchers may show each rank its own); servers and machines without cards compute on the CPU.

    Raises:
        ConfigError: If several devices are visible, but fewer than ranks on this host.
    """
    if role.kind == "server" or accelerator.find_kind() is None:
        return torch.device("cpu")
    count = accelerator.count_devices()
    device = role.local_rank if role.device_index is None else role.device_index
    if 1 < count <= device:
        raise ConfigError(
            f"Local rank {role.local_rank} needs device {device}, but this host shows {count}. "
            f"Start at most {count} ranks here, or set CUDA_VISIBLE_DEVICES per rank."
        )
    return accelerator.select_device(device if count > 1 else 0)


def start(role: Role, *, backend: str | None = None, timeout_s: float | None = None) -> bool:
    """Meet the other workers and make the default process group.

    Collective over the workers; servers and jobs of one process have no group.

    Args:
        role: Who this process is.
        backend: torch backend name; PHALANX_BACKEND when omitted, and without that `shm`, or `cpu:shm,cuda:nccl` where
            a card is used.
        timeout_s: Seconds to wait for the others; PHALANX_RENDEZVOUS_TIMEOUT_S or 60 when omitted.

    Returns:
        Whether a group was made; False for a job of one, for a server, when the script made its own group, for a worker
        that was started again beside servers, as the others are in a group that continues, or fails, without it, and
        where workers beside servers come and go.

    Raises:
        ConfigError: If the script's group does not fit the role, versions differ between ranks, or torch has no such
            backend.
        PeerLostError: If a rank or the store did not come in time; names them.
    """
    global _meeting, _outsider, _starts, _backend
    _log_card()
    if not HAS_NATIVE and role.is_worker and role.rank == 0:
        logger.warning(WITHOUT_NATIVE)
    if dist.is_initialized():
        _adopt(role)
        return False
    if membership.current() is not None and role.is_worker:
        _backend = _choose_backend(backend)  # also of a job that has one rank now, and of a rank that joins
    if role.world_size == 1 or not role.is_worker:
        return False
    if role.server_endpoints and role.least_workers:
        _outsider = role
        return False
    if role.server_endpoints and role.attempt and role.launcher == "phalanx":
        logger.warning(
            "worker %d was started again alone: it trains through the servers, and takes part in no collective call",
            role.rank,
        )
        _outsider = role
        return False
    backend = _backend = _choose_backend(backend)
    timeout_s = rendezvous_timeout_s() if timeout_s is None else timeout_s
    prefix = f"phalanx/{role.attempt}/{_starts}"
    _choose_interface(role)
    store = open_store(role, prefix, timeout_s)
    peers = meet(
        store, _announcement(role), _expected_processes(role),
        timeout_s=timeout_s, clock=time.monotonic, log_line=logger.warning, probe=probe,
    )  # fmt: skip
    _starts += 1
    _make_group(role, store, backend)
    _meeting = JobMembership(role, store, peers)
    log_group(backend, role.local_rank, ring=0)
    return True


def reform(role: Role, view: View, attempt: int, timeout_s: float = REFORM_TIMEOUT_S) -> None:
    """End the process group, and make that of the members of another membership epoch, in the same processes.

    Collective over the members of the view. Groups of the script's own end too.

    Args:
        role: Who this process is in the view.
        view: The members.
        attempt: How often its members have tried before.
        timeout_s: Seconds to wait for them.

    Raises:
        PeerLostError: If a member does not come, or the launcher says meanwhile that it is lost.
    """
    global _meeting, _generation, _backend
    stop(is_reforming=True)
    _generation += 1
    if role.world_size == 1:
        return
    _backend = _backend or _choose_backend(None)
    # A view without its joiners and the view with them are different groups, and keys of a failed attempt are stale.
    store = store_of(view, f"{hashlib.sha256(' '.join(view.ids).encode()).hexdigest()[:12]}/{attempt}", timeout_s)
    # Torch counts groups to name their keys, and not all members may have begun the ones that failed.
    dist.distributed_c10d._world.group_count = 0
    store.set(f"here/{role.rank}", _announcement(role).to_json())
    keys = [f"here/{rank}" for rank in range(role.world_size)]
    await_members(store, keys, view, timeout_s)
    try:
        _make_group(role, store, _backend, timedelta(seconds=timeout_s))
    except dist.DistError as error:
        stop(is_reforming=True)
        raise PeerLostError(f"membership epoch {view.epoch}: its process group was not formed: {error}") from error
    _meeting = JobMembership(role, store, [Announcement.from_json(store.get(key)) for key in keys])


def store_of(view: View, purpose: str, timeout_s: float = REFORM_TIMEOUT_S) -> JobStore:
    """Return where the members of a membership epoch tell each other things.

    Raises:
        PeerLostError: If the store does not answer.
    """
    host, port = split_endpoint(view.store, "the store of a membership epoch")
    try:
        store = connect_store(host, port, timeout_s)
    except dist.DistError as error:
        raise PeerLostError(f"the store of membership epoch {view.epoch} at {view.store} is gone: {error}") from error
    return JobStore(store, view.store, f"phalanx/members/{view.epoch}/{purpose}")


def await_members(store: JobStore, keys: Sequence[str], view: View, timeout_s: float) -> None:
    """Wait until every member of a membership epoch has set its key, and ask about those that are late.

    Args:
        store: From `store_of`.
        keys: That of each member, by rank.
        view: The members.
        timeout_s: Longest wait.

    Raises:
        PeerLostError: If one does not come, or the launcher says meanwhile that it is lost.
    """
    began = time.monotonic()
    while not store.wait(keys, SUSPECT_EVERY_S):
        waited = time.monotonic() - began
        absent = [rank for rank, key in enumerate(keys) if not store.has([key])]
        if (own := membership.current()) is not None:
            own.suspect(absent, waited)
        if waited > timeout_s:
            ids = ", ".join(view.ids[rank] for rank in absent)
            raise PeerLostError(f"membership epoch {view.epoch}: {ids} did not come within {waited:.0f} s")


def generation() -> int:
    """Return how often `reform` was called in this process."""
    return _generation


def outsider() -> Role | None:
    """Return this worker's role if it trains through servers alone, else None.

    It was started again beside a group that it is not in, or workers come and go.
    """
    return _outsider


def stop(*, is_reforming: bool = False) -> None:
    """End the process group made by `start` or `reform`. Safe to call when there is none."""
    global _meeting
    _meeting = None
    if not dist.is_initialized():
        return
    # Objects in reference cycles (reducers, modules) may hold works of the group, which must not outlive it. The whole
    # heap takes half a second, so between two membership epochs only what is new is looked through.
    gc.collect(1 if is_reforming else 2)
    dist.destroy_process_group()


def has_met() -> bool:
    """Return whether `start` found other ranks, or the group of the script."""
    return _meeting is not None


def meeting() -> JobMembership:
    """Return what `start` learned of the other ranks; for a group the script made, only its store.

    Raises:
        ConfigError: If this process has no group.
    """
    if _meeting is None:
        raise ConfigError("This process has met no other ranks. Call phalanx.init() first.")
    return _meeting


def describe_rank(rank: int) -> str:
    """Return `rank 1 (host h, pid p, log f)`, as far as it is known."""
    if _meeting is not None and rank < len(_meeting.peers):
        return str(_meeting.peers[rank])
    return f"rank {rank}"


def rendezvous_timeout_s() -> float:
    """Return the seconds to wait for other ranks, from PHALANX_RENDEZVOUS_TIMEOUT_S or the default.

    Raises:
        RoleError: If the variable is not a positive number.
    """
    text = os.environ.get("PHALANX_RENDEZVOUS_TIMEOUT_S", "").strip()
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise RoleError(
            f"PHALANX_RENDEZVOUS_TIMEOUT_S must be a positive number of seconds, found {text!r}. Correct it."
        )
    return seconds


def log_group(backend: str, local_rank: int, ring: int, group: dist.ProcessGroup | None = None) -> None:
    """Log the line that says a group of ranks stands, and what carries its tensors; `shm+gloo` spans several hosts."""
    card = accelerator.current_index()
    own_group = group or dist.distributed_c10d._get_default_group()
    name = "nccl" if card >= 0 and "nccl" in backend else getattr(own_group, "carrier", backend)
    size = dist.get_world_size(group)
    logger.info("init %s context nranks: %d local rank: %d gpu id: %d ring id: %d", name, size, local_rank, card, ring)


def _choose_backend(argument: str | None) -> str:
    shared_memory.register()
    chosen = argument or os.environ.get("PHALANX_BACKEND", "").strip()
    if not chosen:
        return accelerator.default_backend(shared_memory.NAME)
    backends = set(dist.Backend.backend_list) - {dist.Backend.UNDEFINED}
    for part in chosen.lower().split(","):
        name = part.rpartition(":")[2]
        if name not in backends:
            source = "backend=" if argument else "PHALANX_BACKEND="
            raise ConfigError(
                f"{source}{chosen} is no backend of torch {torch.__version__}.{did_you_mean(name, backends)} "
                f"Known are {', '.join(sorted(backends))}, and pairs such as cpu:gloo,cuda:nccl."
            )
    return chosen


def _log_card() -> None:
    description = accelerator.describe_device()
    if description is None:
        logger.debug("CUDA available: False, torch %s", torch.__version__)
    else:
        logger.info("%s", description)


def _adopt(role: Role) -> None:
    global _meeting
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (role.rank, role.world_size):
        raise ConfigError(
            f"The script made a process group in which this is rank {rank} of {size}, but the environment says rank "
            f"{role.rank} of {role.world_size} (launcher: {role.launcher}). Remove the script's init_process_group, or "
            "give it the environment's rank and world size."
        )
    store = dist.distributed_c10d._get_default_store()
    _meeting = JobMembership(role, JobStore(store, "the script's store", f"phalanx/{role.attempt}/adopted"), [])


def _announcement(role: Role) -> Announcement:
    return Announcement(
        rank=role.rank, host=socket.gethostname(), pid=os.getpid(), log_file=_log_file(role, role.rank),
        torch=torch.__version__, phalanx=__version__,
    )  # fmt: skip


def _expected_processes(role: Role) -> list[Expected]:
    listed = role.worker_endpoints
    return [
        Expected(rank=r, endpoint=listed[r] if r < len(listed) else "", log_file=_log_file(role, r))
        for r in range(role.world_size)
    ]


def _log_file(role: Role, rank: int) -> str:
    own = Path(os.environ.get("PHALANX_LOG_FILE", ""))
    if rank == role.rank and own.name:
        return str(own)
    if own.parent.name == f"rank_{role.rank}":
        return str(own.parents[1] / f"rank_{rank}" / own.name)
    return str(Path(role.log_dir) / f"workerlog.{rank}") if role.log_dir else ""


def _make_group(role: Role, store: JobStore, backend: str, meeting_timeout: timedelta | None = None) -> None:
    torch_store = PrefixStore("group", store.torch_store)
    if meeting_timeout is not None:
        torch_store.set_timeout(meeting_timeout)  # a member may be lost while the group is made
    dist.init_process_group(
        backend, store=torch_store, rank=role.rank, world_size=role.world_size, timeout=collective_timeout()
    )


def _choose_interface(role: Role) -> None:
    """Bind gloo to the interface on the way to the master, unless the user chose one.

    Left alone gloo binds what the host's own name resolves to, often 127.0.1.1, which no other host can reach.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME") or not role.master_addr:
        return
    addresses = addresses_of(role.master_addr)
    if not addresses:
        return  # Waiting for the store says what is wrong with the name.
    if role.node_count > 1 and network.is_loopback(addresses[0]):
        interface = _interface_off_this_host(role, addresses[0])
    else:
        interface = network.interface_towards(addresses[0], network.system_routes())
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _interface_off_this_host(role: Role, resolved: str) -> str | None:
    """Rank 0's own name may mean loopback on its own host; the route to another host tells the interface."""
    others = [a for e in role.worker_endpoints for a in addresses_of(e.rpartition(":")[0])]
    for address in others:
        if not network.is_loopback(address):
            return network.interface_towards(address, network.system_routes())
    if role.node_rank == 0 and (default := network.interface_towards("192.0.2.1", network.system_routes())):
        return default  # An address for documentation: no host has it, so it is routed as any far host is.
    raise RoleError(
        f"MASTER_ADDR={role.master_addr} resolves to {resolved} here, which only this host can reach, but the "
        f"job has {role.node_count} hosts. Set MASTER_ADDR to the first host's address, or correct /etc/hosts."
    )
