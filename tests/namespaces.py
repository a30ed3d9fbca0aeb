"""Hosts that are namespaces of this machine: two networks with a cable between, a small /dev/shm; where root may."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESSES = ("10.254.77.1", "10.254.77.2")


def _fails(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return True
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0


def need_mount_namespaces() -> None:
    """Skip where this user may not mount."""
    if _fails("unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"):
        pytest.skip("mount namespaces need root (CAP_SYS_ADMIN) and unshare")


@contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Yield, for each of two hosts, the words to put before a command that is to run there; skip without the right."""
    names = [f"phx-{os.getpid()}-{number}" for number in range(2)]
    if _fails("ip", "netns", "add", names[0]):
        pytest.skip("network namespaces need root (CAP_NET_ADMIN) and iproute2")
    try:
        _ip("netns", "add", names[1])
        _ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = ([*_inside(name), f"host-{letter}"] for name, letter in zip(names, "ab", strict=True))
        yield first, second
    finally:
        for name in names:
            _fails("ip", "netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _inside(name: str) -> list[str]:
    return ["ip", "netns", "exec", name, "unshare", "-u", "sh", "-c", 'hostname "$0" && exec "$@"']


def with_shared_memory(size: str) -> list[str]:
    """Return the words to put before a command that is to have so large a /dev/shm."""
    return ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh"]
