"""Look at the host before every start of a job: warnings that explain later failures (pure, but `look`)."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence

from phalanx.cluster.host_limits import (
    NEEDS_MEMORY,
    NEEDS_OPEN_FILES,
    NEEDS_SHARED_MEMORY,
    OPEN_FILES_ADVISED,
    HostLimits,
)
from phalanx.i18n import tr
from phalanx.units import format_bytes

IFNAMES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def look(environment: Mapping[str, str]) -> list[str]:
    """Return warnings about this host, for a job that starts with these variables."""
    try:
        limits, interfaces = HostLimits.read(), [name for _, name in socket.if_nameindex()]
    except OSError:
        return []  # A system that does not show its limits is no reason not to start.
    return list(warnings(limits, environment, interfaces))


def warnings(limits: HostLimits, environment: Mapping[str, str], interfaces: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each thing that a job may fail by.

    Args:
        limits: Of this host.
        environment: Variables the job starts with.
        interfaces: Network interfaces of this host.
    """
    if limits.shared_memory is None or limits.shared_memory_free < NEEDS_SHARED_MEMORY.scarce:
        yield tr(
            "/dev/shm has {free} free. Ranks do not need it, and loader workers (num_workers) pass batches through "
            "memory without a file instead; those that a script starts by spawn, and other programs, may end with a "
            "bus error: docker run --shm-size=8g.",
            free=format_bytes(limits.shared_memory_free),
        )
    if limits.open_files < NEEDS_OPEN_FILES.scarce:
        yield tr(
            "A process may open {count} files only; ranks, sockets and data files need more. Run: ulimit -n {wanted}",
            count=limits.open_files,
            wanted=min(limits.open_files_most, OPEN_FILES_ADVISED),
        )
    if limits.is_throttled and "OMP_NUM_THREADS" not in environment:
        yield tr(
            "The container gets {quota} cores' time, and {cores} cores are seen: their threads would be throttled. Set "
            "OMP_NUM_THREADS, or give it more (docker run --cpus).",
            quota=f"{limits.cpu_quota:g}",
            cores=limits.cores,
        )
    if limits.memory_limit is not None and limits.memory_limit - limits.memory_used < NEEDS_MEMORY.scarce:
        yield tr(
            "The container may use {limit} of memory, and {used} are in use. What takes more is killed (SIGKILL).",
            limit=format_bytes(limits.memory_limit),
            used=format_bytes(limits.memory_used),
        )
    for variable in IFNAMES:
        setting = environment.get(variable, "")
        if missing := missing_interfaces(variable, setting, interfaces):
            yield tr(
                "{variable}={setting} names {missing}; this host has {present}. Correct or unset it.",
                variable=variable,
                setting=setting,
                missing=", ".join(missing),
                present=", ".join(interfaces),
            )


def missing_interfaces(variable: str, setting: str, present: Sequence[str]) -> list[str]:
    """Return the interfaces that a variable names and a host lacks.

    To NCCL a name is a prefix unless `=` stands before the list, and `^` excludes; to gloo it is the whole name.
    """
    is_prefix = variable.startswith("NCCL") and not setting.startswith("=")
    if setting.startswith("^") and is_prefix:
        return []
    names = [name.strip() for name in setting.removeprefix("=").split(",")]
    return [
        name
        for name in names
        if name and name not in present and not (is_prefix and any(other.startswith(name) for other in present))
    ]
