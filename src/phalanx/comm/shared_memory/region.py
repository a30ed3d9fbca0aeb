"""`join`: create and join the shared memory (memfd) of the ranks of one host.

The memory is a `memfd`: it has no file name, so nothing can be left behind however a rank ends, and the size of
/dev/shm does not matter. The others open it through /proc, which only the same user may do. The store carries where it
is and a random word that proves it is the right one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import Store  # type: ignore[attr-defined]

from phalanx.comm.elastic.membership import check_members
from phalanx.comm.waits.polling import Pause
from phalanx.errors import PeerLostError

if TYPE_CHECKING:
    from phalanx._core import SharedGroup

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.02
"""Pause between two looks for a key, doubled from the first to the longest."""

_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
"""2 where the kernel promises no more memory than it has."""


def host_identity() -> str:
    """Return what is equal for processes that can share memory: one kernel, one space of process ids, one user.

    `PHALANX_HOST_ID` stands in for it, to try on one machine what happens between hosts. Where the system does not
    tell, the process counts as a host of its own.
    """
    if host_id := os.environ.get("PHALANX_HOST_ID", "").strip():
        return host_id
    host = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{host}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"
    except OSError:
        return f"{host}/{os.getpid()}/{secrets.token_hex(8)}"


def join(store: Store, rank: int, local: Sequence[int], name: str, timeout_s: float) -> tuple[SharedGroup | None, str]:
    """Enter the memory of the group's ranks on this host. Collective over `local`.

    Args:
        store: Keys of this group alone.
        rank: This rank in the group.
        local: The ranks of the group on this host, this one included; the first makes the memory.
        name: How errors of other ranks call this one.
        timeout_s: Seconds an operation may take.

    Returns:
        The native group, or None with the reason that keeps this rank out.
    """
    core, refusal, descriptor = None, "", -1
    try:
        from phalanx import _core

        size = _core.SharedGroup.bytes_for(len(local))
        if rank == local[0]:
            descriptor = _make(store, rank, size)
        with _open_region(store, local[0], size) as fd:
            core = _core.SharedGroup(fd, local.index(rank), len(local), name, timeout_s)
    except ImportError:
        refusal = "the native core is not built here"
    except (OSError, RuntimeError) as error:
        refusal = f"the shared memory cannot be used ({error})"
    if rank == local[0] and descriptor < 0:
        store.set(f"region/{rank}", "")  # the others must not wait for it
    store.set(f"entered/{rank}", "")
    if descriptor >= 0:
        for r in local:
            await_key(store, f"entered/{r}")  # until then they open it through this descriptor
        os.close(descriptor)
    return core, refusal


def await_key(store: Store, key: str) -> str:
    """Return what a rank tells the others of a group that is being formed, once it does.

    Args:
        store: Keys of this group alone.
        key: A topic and the rank in the group, such as `host/1`.

    Raises:
        PeerLostError: If the store's timeout passes, or a member of an elastic job is lost meanwhile.
    """
    limit: timedelta = store.timeout  # type: ignore[attr-defined]
    deadline, pause = time.monotonic() + limit.total_seconds(), Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while not store.check([key]):
        check_members()
        if time.monotonic() > deadline:
            rank = key.rpartition("/")[2]
            raise PeerLostError(
                f"rank {rank} did not join the process group within {limit.total_seconds():.0f} s; see its log"
            )
        pause.wait()
    return store.get(key).decode()


def _make(store: Store, rank: int, size: int) -> int:
    word = secrets.token_hex(16)
    fd = os.memfd_create(f"phalanx-{word}", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        if _OVERCOMMIT.read_text().strip() == "2":
            os.posix_fallocate(fd, 0, size)  # else a page may be refused when it is touched, which ends the process
    except OSError:
        os.close(fd)
        raise
    store.set(f"region/{rank}", f"{os.getpid()} {fd} {word}")
    return fd


@contextlib.contextmanager
def _open_region(store: Store, maker: int, size: int) -> Iterator[int]:
    location = await_key(store, f"region/{maker}").split()
    if not location:
        raise OSError("the first rank could not make it")
    pid, number, word = location
    path = f"/proc/{pid}/fd/{number}"
    if f"phalanx-{word}" not in os.readlink(path):
        raise OSError(f"{path} is something else by now")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != size:
            raise OSError(f"it has {os.fstat(fd).st_size} bytes, not {size}: builds of the native core differ")
        yield fd
    finally:
        os.close(fd)
