"""Collect the facts that `phalanx doctor` judges, among them a gloo all-reduce on this host."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx import __version__
from phalanx.cluster import network
from phalanx.cluster.host_limits import HostLimits
from phalanx.cluster.spec.detect import memory_bytes
from phalanx.diagnose.doctor import checks, resource_checks
from phalanx.diagnose.doctor.checks import Check
from phalanx.errors import LaunchError
from phalanx.launch.preload import import_torch
from phalanx.launch.request import machine
from phalanx.launch.request.preflight import IFNAMES
from phalanx.versions import HAS_NATIVE

ALL_REDUCE_TIMEOUT_S = 10.0

_ANYWHERE = "192.0.2.1"
"""An address for documentation: no host has it, so packets to it leave by the default route."""


def examine(towards: str = _ANYWHERE) -> Iterator[Check]:
    """Yield one judgement after the other, so that they can be shown as they come.

    Args:
        towards: An address of another node, for the route; any other network when omitted.
    """
    limits = HostLimits.read()
    yield checks.package(__version__)
    yield checks.python(sys.version_info[:2])
    yield _torch()
    yield _native_core()
    yield _all_reduce()
    yield _host_name()
    yield resource_checks.route(*_route(towards))
    yield _interfaces()
    yield _ports()
    yield checks.shared_memory(limits.shared_memory, limits.shared_memory_free)
    yield checks.open_files(limits.open_files, limits.open_files_most)
    yield resource_checks.cpu_limit(limits)
    yield resource_checks.memory_limit(limits, memory_bytes())
    yield resource_checks.disk(os.getcwd(), limits.disk_free)
    yield _devices()
    yield checks.threads(os.environ.get("OMP_NUM_THREADS"), limits.cores)
    yield checks.compiler(shutil.which(os.environ.get("CXX", "g++")))
    yield checks.dead_flags(os.environ)


def _torch() -> Check:
    was_enabled = gc.isenabled()
    gc.disable()  # a tenth of the time
    try:
        version = importlib.metadata.version("torch")
        import_torch()
    except (ImportError, OSError) as error:
        return checks.torch_build(None, str(error))
    finally:
        if was_enabled:
            gc.enable()
    from phalanx import accelerator

    gpus = accelerator.list_names()
    return checks.torch_build(version, f"{accelerator.runtime_name()}: {', '.join(gpus)}" if gpus else "no GPU")


def _native_core() -> Check:
    try:
        importlib.import_module("phalanx._core")
    except ImportError as error:
        return checks.native_core(str(error), HAS_NATIVE)
    return checks.native_core("")


def _all_reduce() -> Check:
    start = time.perf_counter()
    try:
        error = all_reduce_between_threads()
    except ImportError as missing:
        error = str(missing)
    return checks.loopback(error, time.perf_counter() - start)


def all_reduce_between_threads(timeout_s: float = ALL_REDUCE_TIMEOUT_S) -> str:
    """All-reduce between two gloo ranks, one thread each, over real sockets as a job on this host would.

    Returns:
        An empty string, or what went wrong.
    """
    from datetime import timedelta

    import torch
    from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

    store = HashStore()
    problems: list[str] = []

    def run(rank: int) -> None:
        group = ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s))
        x = torch.full((3,), rank + 1.0)
        group.allreduce([x]).wait()  # type: ignore[attr-defined]
        if x.tolist() != [3.0, 3.0, 3.0]:
            problems.append(f"rank {rank} got {x.tolist()} instead of [3, 3, 3]")

    ranks = [threading.Thread(target=_collecting(run, rank, problems), daemon=True) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(timeout_s + 1.0)
    if any(thread.is_alive() for thread in ranks):
        problems.append(f"not done after {timeout_s:g} s")
    return "; ".join(problems)


def _collecting(run: Callable[[int], None], rank: int, problems: list[str]) -> Callable[[], None]:
    def guarded() -> None:
        try:
            run(rank)
        except RuntimeError as error:
            problems.append(f"rank {rank}: {str(error).splitlines()[0]}")

    return guarded


def _host_name() -> Check:
    name = socket.gethostname()
    try:
        entries = socket.getaddrinfo(name, None, socket.AF_INET)
    except socket.gaierror:
        return checks.host_name(name, [])
    return checks.host_name(name, list(dict.fromkeys(str(entry[4][0]) for entry in entries)))


def _route(towards: str) -> tuple[str | None, str]:
    """Return the interface and the own address by which packets to another node leave; nothing without a route."""
    try:
        target = machine.resolve(towards)
        return network.interface_towards(target, network.system_routes()), machine.address_towards(target)
    except (LaunchError, ValueError):
        return None, ""


def _interfaces() -> Check:
    variables = {name: os.environ[name] for name in IFNAMES if os.environ.get(name)}
    return resource_checks.interfaces(variables, [name for _, name in socket.if_nameindex()])


def _devices() -> Check:
    host, everything = machine.Machine.detect(os.environ), machine.Machine.detect({})
    return resource_checks.devices(len(everything.gpus), host.usable_gpus, host.hidden_by)


def _ports() -> Check:
    table = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, table.read_text().split()) if table.exists() else (0, 65535)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return checks.ports(first, last, f"no port can be bound ({error.strerror})")
    return checks.ports(first, last, "")
