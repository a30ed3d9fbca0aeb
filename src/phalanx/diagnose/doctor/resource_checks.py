"""Checks of `phalanx doctor`: what the host or container gives: cores, memory, disk, devices, network (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cluster.host_limits import NEEDS_DISK, NEEDS_MEMORY, HostLimits
from phalanx.diagnose.doctor.checks import Check, State
from phalanx.launch.request.preflight import missing_interfaces
from phalanx.units import format_bytes


def cpu_limit(limits: HostLimits) -> Check:
    """Judge the processor time that the cgroup gives."""
    if limits.cpu_quota is None:
        return Check(name="cpu limit", state="ok", observed=f"{limits.cores} cores, no quota")
    observed = f"{limits.cpu_quota:g} cores' time on {limits.cores} cores"
    if limits.is_throttled:
        threads = max(1, int(limits.cpu_quota))
        advice = (
            f"Give all ranks of this host {threads} threads together (OMP_NUM_THREADS={threads} for one rank): those "
            "beyond the quota are stopped for the rest of each tenth of a second. Or give the container more "
            "(docker run --cpus)."
        )
        return Check(name="cpu limit", state="warning", observed=observed, advice=advice)
    return Check(name="cpu limit", state="ok", observed=observed)


def memory_limit(limits: HostLimits, memory: int) -> Check:
    """Judge the memory that the cgroup gives, or the machine's own `memory` where there is no limit."""
    total = memory if limits.memory_limit is None else min(memory, limits.memory_limit)
    where = "no limit" if limits.memory_limit is None else f"limit, {format_bytes(limits.memory_used)} used"
    observed, free = f"{format_bytes(total)}, {where}", total - limits.memory_used
    if free < NEEDS_MEMORY.recommended:
        advice = (
            f"{format_bytes(max(0, free))} are left; whoever takes more is killed with SIGKILL. Give the container "
            "more (docker run --memory, resources.limits.memory), or end what else runs in it."
        )
        return Check(name="memory limit", state="warning", observed=observed, advice=advice)
    return Check(name="memory limit", state="ok", observed=observed)


def disk(folder: str, free: int) -> Check:
    """Judge the room where logs and checkpoints of a job started here go."""
    observed = f"{format_bytes(free)} free in {folder}"
    if free < NEEDS_DISK.recommended:
        state: State = "failed" if free < NEEDS_DISK.needed else "warning"
        advice = "Make room, or name another place: --log-dir, and the folder given to px.save."
        return Check(name="disk", state=state, observed=observed, advice=advice)
    return Check(name="disk", state="ok", observed=observed)


def devices(present: int, usable: Sequence[str], hidden_by: str) -> Check:
    """Judge the GPUs.

    Args:
        present: GPUs that the system shows.
        usable: Names of those that torch can use.
        hidden_by: The setting that hides some, or nothing.
    """
    observed = f"{len(usable)} of {present} GPUs" + (f": {', '.join(dict.fromkeys(usable))}" if usable else "")
    if present and not usable:
        advice = (
            f"Unset {hidden_by.partition('=')[0]}, which hides them."
            if hidden_by
            else "Install a torch that was built with CUDA, and a driver that is as new (nvidia-smi shows it)."
        )
        return Check(name="devices", state="warning", observed=observed, advice=advice)
    return Check(name="devices", state="ok", observed=observed if present else "no GPU: training runs on the CPU")


def interfaces(variables: dict[str, str], present: Sequence[str]) -> Check:
    """Judge the network interfaces that variables name.

    Args:
        variables: Those that are set of GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME, NCCL_SOCKET_IFNAME.
        present: Interfaces of this host.
    """
    for variable, setting in variables.items():
        if missing := missing_interfaces(variable, setting, present):
            advice = f"{variable}={setting} names {', '.join(missing)}, which this host lacks. Correct or unset it."
            return Check(name="interfaces", state="failed", observed=", ".join(present), advice=advice)
    named = [f"{variable}={setting}" for variable, setting in variables.items()]
    return Check(name="interfaces", state="ok", observed=", ".join([*present, *named]))


def route(interface: str | None, address: str) -> Check:
    """Judge how packets to the other nodes leave this host."""
    if interface is None or not address:
        advice = "Give this host a route to the others: `ip route` shows what there is. One host alone needs none."
        return Check(name="route", state="warning", observed="none", advice=advice)
    return Check(name="route", state="ok", observed=f"{interface}, {address}")
