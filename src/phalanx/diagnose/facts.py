"""Collect the facts that `phalanx doctor` judges, among them a gloo all-reduce on this host."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.diagnose import checks
from phalanx.diagnose.checks import Check

ALL_REDUCE_TIMEOUT_S = 10.0


def examine() -> Iterator[Check]:
    """Yield one judgement after the other, so that they can be shown as they come."""
    yield checks.python(sys.version_info[:2])
    yield _torch()
    yield _native_core()
    yield _all_reduce()
    yield _host_name()
    yield _shared_memory()
    yield checks.open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield _ports()
    yield checks.threads(os.environ.get("OMP_NUM_THREADS"), len(os.sched_getaffinity(0)))
    yield checks.compiler(shutil.which(os.environ.get("CXX", "g++")))
    yield checks.dead_flags(os.environ)


def _torch() -> Check:
    try:
        version = importlib.metadata.version("torch")
        import torch
    except (ImportError, OSError) as error:
        return checks.torch_build(None, str(error))
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return checks.torch_build(version, f"CUDA {torch.version.cuda}: {', '.join(gpus)}" if gpus else "no CUDA GPU")


def _native_core() -> Check:
    try:
        importlib.import_module("phalanx._core")
    except ImportError as error:
        return checks.native_core(str(error))
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


def _shared_memory() -> Check:
    if not Path("/dev/shm").is_dir():
        return checks.shared_memory(None, 0)
    disk = os.statvfs("/dev/shm")
    return checks.shared_memory(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)


def _ports() -> Check:
    table = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, table.read_text().split()) if table.exists() else (0, 65535)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return checks.ports(first, last, f"no port can be bound ({error.strerror})")
    return checks.ports(first, last, "")
