"""Bring together what `phalanx doctor` found on every node of a job, over the meeting port of the first one.

Every node runs the same command. They meet as launchers do: the first node holds torch's TCPStore at the port at which
a job's launchers would meet. It is open while the command runs, to whoever reaches the port; what comes out of it is
checked, and is only shown.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from phalanx.diagnose.doctor.checks import Check
from phalanx.diagnose.doctor.probe import LinkQuality, ProbeServer, measure
from phalanx.errors import ConfigError, PeerLostError
from phalanx.launch.request import machine

POLL_S = 0.05
BYE_S = 5.0
LATE_S = 30.0
"""How long nodes wait for measurements of another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingOptions:
    """Which node of how many this is, and where they meet."""

    node_rank: int
    nnodes: int
    master_addr: str
    master_port: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """What one node says of itself."""

    node_rank: int
    host: str
    address: str
    port: int
    """Of its probe server."""

    versions: dict[str, str]
    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobReport:
    """What all nodes of a job found."""

    nodes: tuple[NodeReport, ...]
    links: tuple[tuple[LinkQuality | None, ...], ...]
    """By the node that measured and the one that answered; None of a node to itself."""


_REPORT, _LINKS = TypeAdapter(NodeReport), TypeAdapter(tuple[LinkQuality | None, ...])
_Value = TypeVar("_Value")


class NodeMeeting:
    """The store over which nodes meet, and this node's probe server.

    Args:
        options: This node's place.

    Raises:
        ConfigError: If torch cannot be imported.
        LaunchError: If there is no route to the first node, or its port is taken.
        PeerLostError: If the first node does not answer in time.
    """

    def __init__(self, options: MeetingOptions) -> None:
        self._options = options
        master = machine.resolve(options.master_addr)
        self.address = master if options.node_rank == 0 else machine.address_towards(master)
        self._store = self._open_store(master)
        self._server = ProbeServer(self.address)

    def exchange(self, versions: dict[str, str], checks: Sequence[Check], *, with_bandwidth: bool) -> JobReport:
        """Return the reports of all nodes and what each measured of the others.

        Args:
            versions: Of this node, by what they are of.
            checks: What was found on this node.
            with_bandwidth: Whether bandwidth is measured too, one node after the other.

        Raises:
            PeerLostError: If a node does not come in time; names those that are missing.
            ConfigError: If one sent what is no report, or two say they are the same node.
        """
        options = self._options
        self._deadline = time.monotonic() + options.timeout_s
        report = NodeReport(
            node_rank=options.node_rank,
            host=socket.gethostname(),
            address=self.address,
            port=self._server.port,
            versions=versions,
            checks=tuple(checks),
        )
        if self._store.add(f"claim/{options.node_rank}", 1) > 1:
            raise ConfigError(f"Two nodes say they are node {options.node_rank}. Give every node its own --node-rank.")
        self._store.set(f"report/{options.node_rank}", _REPORT.dump_json(report))
        nodes = tuple(_decode(_REPORT, text) for text in self._all("report"))
        if with_bandwidth and options.node_rank > 0:  # one node after the other, so that none takes another's bandwidth
            self._deadline = time.monotonic() + options.timeout_s + LATE_S * options.node_rank
            self._wait(f"links/{options.node_rank - 1}")
        measured = _measure_all(nodes, options.node_rank, with_bandwidth=with_bandwidth)
        self._store.set(f"links/{options.node_rank}", _LINKS.dump_json(measured))
        self._deadline = time.monotonic() + LATE_S * (options.nnodes if with_bandwidth else 1)
        links = tuple(_decode(_LINKS, text) for text in self._all("links"))
        ranks, lengths = [node.node_rank for node in nodes], {len(row) for row in links}
        if ranks != list(range(options.nnodes)) or lengths != {options.nnodes}:
            raise ConfigError(
                "Nodes disagree on how many they are. Give each the same --nnodes and a --node-rank of its own."
            )
        return JobReport(nodes=nodes, links=links)

    def close(self) -> None:
        """Leave; the first node last, as the store goes with it."""
        self._server.close()
        deadline = time.monotonic() + BYE_S
        names = [f"bye/{node}" for node in range(self._options.nnodes)]
        with contextlib.suppress(RuntimeError):  # the store is gone already
            self._store.set(f"bye/{self._options.node_rank}", "1")
            while self._options.node_rank == 0 and time.monotonic() < deadline and not self._store.check(names):
                time.sleep(POLL_S)

    def _open_store(self, master: str) -> Any:
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"torch cannot be imported on this node ({error}), and nodes meet by its store. Install it; "
                "`phalanx doctor` without --nnodes shows the rest."
            ) from None
        options, patience = self._options, timedelta(seconds=self._options.timeout_s)
        self._deadline = time.monotonic() + options.timeout_s  # torch is imported by now
        if options.node_rank == 0:
            listening = machine.bind(master, options.master_port, flag="--master-port", listen=True)
            return TCPStore(
                master,
                options.master_port,
                None,
                True,
                timeout=patience,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        why = self._wait_for_port(master)
        if why:
            raise PeerLostError(
                f"The first node did not answer at {master}:{options.master_port} within {options.timeout_s:g} s "
                f"({why}). Run the same command there with --node-rank 0, and check that the port is open between the "
                "nodes."
            )
        return TCPStore(master, options.master_port, None, False, timeout=patience)

    def _wait_for_port(self, master: str) -> str:
        """Try until the first node listens, as torch's own client would in silence; returns why it does not."""
        why = ""
        while time.monotonic() < self._deadline:
            try:
                socket.create_connection((master, self._options.master_port), timeout=2).close()
                return ""
            except OSError as error:
                why = error.strerror or "no answer"
            time.sleep(POLL_S)
        return why or "no answer"

    def _all(self, what: str) -> list[bytes]:
        return [self._wait(f"{what}/{node}") for node in range(self._options.nnodes)]

    def _wait(self, key: str) -> bytes:
        try:
            while not self._store.check([key]):
                if time.monotonic() > self._deadline:
                    raise PeerLostError(self._missing(key.partition("/")[0]))
                time.sleep(POLL_S)
            value: bytes = self._store.get(key)
        except RuntimeError as error:
            if isinstance(error, PeerLostError):
                raise
            raise PeerLostError(f"The first node is gone: its store no longer answers ({error}).") from None
        return value

    def _missing(self, what: str) -> str:
        missing = [node for node in range(self._options.nnodes) if not self._store.check([f"{what}/{node}"])]
        names = ", ".join(f"node {node}" for node in missing)
        options = self._options
        return (
            f"{len(missing)} of {options.nnodes} nodes did not come within {options.timeout_s:g} s: {names}. Run the "
            "same command there with its own --node-rank."
        )


def _measure_all(nodes: Sequence[NodeReport], own: int, *, with_bandwidth: bool) -> tuple[LinkQuality | None, ...]:
    def quality_of(node: NodeReport) -> LinkQuality | None:
        if node.node_rank == own:
            return None
        return measure(node.address, node.port, with_bandwidth=with_bandwidth)

    with ThreadPoolExecutor(1 if with_bandwidth else 16) as threads:
        return tuple(threads.map(quality_of, nodes))


def _decode(adapter: TypeAdapter[_Value], text: bytes) -> _Value:
    """Return what another node sent.

    Raises:
        ConfigError: If it is none: another version sent it, or another program, as the store asks for no password.
    """
    try:
        return adapter.validate_json(text)
    except ValidationError:
        raise ConfigError(
            f"A node sent {text[:60]!r}, which `phalanx doctor` of this version does not. Run the same version of "
            "phalanx on every node, and let nothing else connect to --master-port."
        ) from None
