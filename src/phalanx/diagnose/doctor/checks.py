"""Checks of `phalanx doctor`: Python, torch, shared memory, ports, limits; each judges one fact (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.cluster import network
from phalanx.cluster.env.settings import TABLE
from phalanx.cluster.host_limits import NEEDS_OPEN_FILES, NEEDS_SHARED_MEMORY, OPEN_FILES_ADVISED
from phalanx.errors import ConfigError
from phalanx.units import format_bytes
from phalanx.versions import WITHOUT_NATIVE, require_torch

State = Literal["ok", "warning", "failed"]

PORTS_WANTED = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One fact, and whether training can live with it."""

    name: str
    state: State
    observed: str
    advice: str = ""
    """What to do; empty when all is well."""

    def to_json(self) -> dict[str, str]:
        """Return the entry of `phalanx doctor --json`."""
        return {"name": self.name, "state": self.state, "found": self.observed, "advice": self.advice}


def package(version: str) -> Check:
    """Name the version of this package."""
    return Check(name="phalanx", state="ok", observed=version)


def python(version: tuple[int, int]) -> Check:
    """Judge the Python version, as (major, minor)."""
    observed = f"{version[0]}.{version[1]}"
    if version < (3, 11):
        return Check(name="python", state="failed", observed=observed, advice="Install Python 3.11 or newer.")
    return Check(name="python", state="ok", observed=observed)


def torch_build(version: str | None, build: str) -> Check:
    """Judge the torch release; `build` says in words what it was built for."""
    try:
        require_torch(version)
    except ConfigError as error:
        return Check(name="torch", state="failed", observed=version or "none", advice=str(error))
    return Check(name="torch", state="ok", observed=f"{version} ({build})")


def native_core(error: str, installed: bool = True) -> Check:
    """Judge the native core: whether it is installed, and its import; `error` is empty when that succeeded."""
    if not installed:
        return Check(name="native core", state="warning", observed="not installed", advice=WITHOUT_NATIVE)
    if error:
        advice = "Reinstall phalanx on this machine; a build from source needs a C++20 compiler and CMake."
        return Check(name="native core", state="failed", observed=error, advice=advice)
    return Check(name="native core", state="ok", observed="imported")


def loopback(error: str, seconds: float) -> Check:
    """Judge a real all-reduce of two gloo ranks on this host; `error` is empty when it succeeded."""
    if error:
        advice = "Check the loopback interface, the firewall and GLOO_SOCKET_IFNAME."
        return Check(name="gloo all-reduce", state="failed", observed=error, advice=advice)
    return Check(name="gloo all-reduce", state="ok", observed=f"2 ranks on this host in {seconds * 1000:.0f} ms")


def host_name(name: str, addresses: list[str]) -> Check:
    """Judge what this host's own name resolves to here."""
    if not addresses:
        advice = "Add the name to /etc/hosts. Until then name hosts by address, e.g. --ips 10.0.0.1,10.0.0.2."
        return Check(name="host name", state="warning", observed=f"{name} does not resolve", advice=advice)
    observed = f"{name} is {', '.join(addresses)}"
    if all(network.is_loopback(a) for a in addresses):
        advice = (
            "Fine on one host. Other hosts cannot reach it under this name: give addresses (--ips, MASTER_ADDR), "
            "or correct /etc/hosts."
        )
        return Check(name="host name", state="warning", observed=observed, advice=advice)
    return Check(name="host name", state="ok", observed=observed)


def shared_memory(total: int | None, free: int) -> Check:
    """Judge /dev/shm by its bytes; `total` is None when it is absent."""
    if total is None:
        advice = "Mount a tmpfs at /dev/shm: processes of Python, loader workers among them, keep semaphores there."
        return Check(name="/dev/shm", state="failed", observed="absent", advice=advice)
    observed = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < NEEDS_SHARED_MEMORY.recommended:
        state: State = "failed" if free < NEEDS_SHARED_MEMORY.needed else "warning"
        advice = (
            "Give the container more (docker run --shm-size=8g; an emptyDir of medium Memory), or remove old files. "
            "Ranks and the workers of their loaders need none of it, but other programs may."
        )
        return Check(name="/dev/shm", state=state, observed=observed, advice=advice)
    return Check(name="/dev/shm", state="ok", observed=observed)


def open_files(soft: int, hard: int) -> Check:
    """Judge the limit of open files of a process."""
    observed = f"{soft} (can be raised to {hard})"
    if soft < NEEDS_OPEN_FILES.recommended:
        state: State = "failed" if soft < NEEDS_OPEN_FILES.needed else "warning"
        return Check(
            name="open files", state=state, observed=observed, advice=f"Run: ulimit -n {min(hard, OPEN_FILES_ADVISED)}"
        )
    return Check(name="open files", state="ok", observed=str(soft))


def ports(first: int, last: int, error: str) -> Check:
    """Judge the ports the system hands out; `error` is why none could be bound, or empty."""
    observed = f"{first}-{last}"
    if error:
        return Check(name="ports", state="failed", observed=error, advice="Allow this user to bind ports on 127.0.0.1.")
    if last - first + 1 < PORTS_WANTED:
        advice = "Widen the range: sysctl net.ipv4.ip_local_port_range='32768 60999'"
        return Check(name="ports", state="warning", observed=observed, advice=advice)
    return Check(name="ports", state="ok", observed=f"one bound; the system hands out {observed}")


def threads(setting: str | None, cores: int) -> Check:
    """Judge OMP_NUM_THREADS against the cores this process may use."""
    observed = f"OMP_NUM_THREADS {setting or 'unset'}, {cores} cores"
    if setting is None:
        return Check(name="threads", state="ok", observed=observed)
    if not setting.isdecimal() or int(setting) < 1:
        return Check(
            name="threads", state="warning", observed=observed, advice="Set it to a number of threads, or unset it."
        )
    if int(setting) > cores:
        advice = "Unset it: the launcher gives each rank its share of the cores."
        return Check(name="threads", state="warning", observed=observed, advice=advice)
    return Check(name="threads", state="ok", observed=observed)


def compiler(path: str | None) -> Check:
    """Judge the C++ compiler that compiled mode needs; `path` is None when there is none."""
    if path is None:
        advice = "Install g++ for strategy.graph and train_step(compiled=True); eager training needs none."
        return Check(name="c++ compiler", state="warning", observed="none", advice=advice)
    return Check(name="c++ compiler", state="ok", observed=path)


def dead_flags(env: Mapping[str, str]) -> Check:
    """Judge whether variables are set that no longer act."""
    variables = [s for s in TABLE if s.family == "dead" and s.name in env]
    if not variables:
        return Check(name="old FLAGS", state="ok", observed="none set")
    advice = " ".join(f"{s.name}: {s.meaning_en}." for s in variables)
    return Check(name="old FLAGS", state="warning", observed=", ".join(s.name for s in variables), advice=advice)
