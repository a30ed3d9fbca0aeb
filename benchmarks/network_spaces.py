"""Network namespaces on one bridge that stand for machines, and cables that can be pulled. Needs root."""

from __future__ import annotations

import os
import subprocess
import uuid
from types import TracebackType


def are_possible() -> bool:
    """Return whether this user may make namespaces and links."""
    if os.getuid() != 0:
        return False
    name = f"probe{uuid.uuid4().hex[:6]}"
    try:
        made = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return made.returncode == 0


class NetworkSpaces:
    """Namespaces with an address each on a network of their own; a context that removes them."""

    def __init__(self, count: int) -> None:
        self._id = uuid.uuid4().hex[:6]
        self._bridge = f"br{self._id}"
        third = int(self._id, 16) % 250 + 1
        self.addresses = tuple(f"10.213.{third}.{node + 1}" for node in range(count))

    def __enter__(self) -> NetworkSpaces:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for node, address in enumerate(self.addresses):
            space, cable = self.space(node), self._cable(node)
            _ip("netns", "add", space)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", cable, "master", self._bridge)
            _ip("link", "set", cable, "up")
            for link in ("lo", "eth0"):
                _ip("-n", space, "link", "set", link, "up")
            _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for node in range(len(self.addresses)):
            subprocess.run(["ip", "link", "del", self._cable(node)], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self.space(node)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    def space(self, node: int) -> str:
        """Name of a namespace."""
        return f"phx{self._id}-{node}"

    def enter(self, node: int) -> tuple[str, ...]:
        """What to write before a command that runs there."""
        return ("nsenter", f"--net=/run/netns/{self.space(node)}")

    def unplug(self, node: int) -> None:
        """Pull the cable: no packet comes or goes, and nobody is told."""
        _ip("link", "set", self._cable(node), "nomaster")

    def plug(self, node: int) -> None:
        """Put the cable back."""
        _ip("link", "set", self._cable(node), "master", self._bridge)

    def limit(self, node: int, rate: str) -> None:
        """Let no more than a rate, as `100mbit`, go to a namespace, and as much from it."""
        bucket = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        _run("tc", "qdisc", "replace", "dev", self._cable(node), *bucket)
        _run("tc", "-n", self.space(node), "qdisc", "replace", "dev", "eth0", *bucket)

    def _cable(self, node: int) -> str:
        return f"v{self._id}-{node}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
