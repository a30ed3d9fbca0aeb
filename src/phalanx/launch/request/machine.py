"""`Machine`: cores, GPUs, addresses and ports of this host, detected without torch."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster import network
from phalanx.errors import LaunchError
from phalanx.i18n import tr
from phalanx.launch.preload import is_cuda_build, torch_libraries

logger = logging.getLogger("phalanx.launch")

REPORT_EVERY_S = 3.0
"""How often a host name that means nothing yet is mentioned."""

POLL_S = 0.5
"""How often it is asked for."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts the launcher decides by; made by `detect`, or by hand in a test."""

    cores: int
    gpus: tuple[str, ...] = ()
    """Names of the GPUs this process may use, as CUDA_VISIBLE_DEVICES spells them."""

    has_cuda_build: bool = False
    """Whether the installed torch was built with CUDA."""

    hidden_by: str = ""
    """The setting that hides GPUs, for messages."""

    pod_ip: str = ""
    """POD_IP of the environment: this host's address when the list has several that are ours."""

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> Machine:
        """Return the facts of this machine."""
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        present = tuple(str(i) for i in range(_count_gpus()))
        gpus = present if visible is None else _visible(visible, present)
        return cls(
            cores=len(os.sched_getaffinity(0)),
            gpus=gpus,
            has_cuda_build=is_cuda_build(torch_libraries()),
            hidden_by="" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}",
            pod_ip=environment.get("POD_IP", ""),
        )

    @property
    def usable_gpus(self) -> tuple[str, ...]:
        """The GPUs torch can use here."""
        return self.gpus if self.has_cuda_build else ()


def _count_gpus() -> int:
    listed = Path("/proc/driver/nvidia/gpus")
    if listed.is_dir():
        return len(list(listed.iterdir()))
    return len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])


def _visible(setting: str, present: tuple[str, ...]) -> tuple[str, ...]:
    """The GPUs left by CUDA_VISIBLE_DEVICES; CUDA stops reading at the first entry it does not know."""
    gpus: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        is_name = entry.startswith(("GPU-", "MIG-"))
        if not present or not (is_name or entry in present):
            break
        gpus.append(entry)
    return tuple(gpus)


def resolve(host: str) -> str:
    """Return the IPv4 address of `host`.

    Raises:
        LaunchError: If it is neither an address nor a name that resolves.
    """
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:  # ValueError: a label that is too long, or no letter
        why = getattr(error, "strerror", None) or error
        raise LaunchError(
            f"'{host}' is no address and no host name this machine can resolve ({why}). "
            "Write the host's IPv4 address, e.g. 10.0.0.1."
        ) from None


def is_ipv4(host: str) -> bool:
    """Return whether `host` is an IPv4 address rather than a name."""
    return host.replace(".", "").isdigit()


def resolve_within(host: str, timeout_s: float) -> str:
    """Return the IPv4 address of a name that may come to be known only when its host has started.

    Says every 3 s that it is waited for.

    Raises:
        LaunchError: If it still means nothing after `timeout_s`.
    """
    started = reported_at = time.monotonic()
    while True:
        try:
            return resolve(host)
        except LaunchError:
            now = time.monotonic()
            if now - started >= timeout_s:
                raise
        if now - reported_at >= REPORT_EVERY_S:
            reported_at = now
            logger.info(tr("server not ready, wait 3 sec to retry..."))
            logger.info(tr("not ready endpoints:{names} ({why})", names=[host], why=tr("no host of this name yet")))
        time.sleep(POLL_S)


def is_own_address(address: str) -> bool:
    """Return whether `address` belongs to this host, that is, whether a socket can be bound to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(peer: str) -> str:
    """Return the address of this host from which packets to `peer` leave.

    Raises:
        LaunchError: If there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError as error:
            raise LaunchError(
                f"No route from this host to {peer} ({error.strerror}). Check the address and the network."
            ) from None
        return str(probe.getsockname()[0])


def bind(address: str, port: int, *, flag: str, listen: bool = False) -> socket.socket:
    """Return a TCP socket bound to `address`.

    Args:
        address: An address of this host.
        port: Port, or 0 for one the system chooses.
        flag: What asked for the port, for the message.
        listen: Whether to listen at once, so that early clients wait instead of being refused.

    Raises:
        LaunchError: If the port is taken; names the process that has it.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port:
            # A run that just ended leaves its fixed port in TIME_WAIT. For port 0 the option would let the
            # system hand out a port that another bound, not yet listening socket has.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
        if listen:
            bound.listen(1024)
    except OSError as error:
        bound.close()
        raise _bind_error(address, port, flag, error) from None
    return bound


def _bind_error(address: str, port: int, flag: str, error: OSError) -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        owner = network.port_owner(port)
        return LaunchError(
            tr(
                "{flag} {port} on {address} is in use by {owner}. End that process, or choose another port.",
                flag=flag,
                port=port,
                address=address,
                owner=owner,
            )
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return LaunchError(f"{flag} {port}: {address} is not an address of this host. Correct the address.")
    return LaunchError(f"{flag} {port} on {address} cannot be bound ({error.strerror}). Choose another port.")
