"""`ElasticMeeting`: the launchers of an elastic job meet; it begins once enough are there, or runs already."""

from __future__ import annotations

import logging
import select
import selectors
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.cluster import network
from phalanx.cluster.env.environment import Environment
from phalanx.cluster.runtime_folder import own_secret
from phalanx.errors import LaunchError, PeerLostError
from phalanx.i18n import tr
from phalanx.launch.elastic.channel import UNREADABLE
from phalanx.launch.elastic.nodes.consensus import is_quorum
from phalanx.launch.elastic.nodes.job_key import JobKey, parse_address
from phalanx.launch.elastic.nodes.mesh import NodeMesh
from phalanx.launch.job.fork_server_handle import ForkServerHandle
from phalanx.launch.process.linux import StopSignals
from phalanx.launch.request import machine
from phalanx.launch.request.nodes import Nodes
from phalanx.launch.request.request import LaunchRequest
from phalanx.launch.request.topology import NodeOffer, check_terms

logger = logging.getLogger("phalanx.launch")

POLL_S = 0.05
REPORT_EVERY_S = 3.0
"""How often missing nodes are named."""

LAST_CALL_S = 10.0
"""How long a job waits for more nodes after the last one came, once it has enough; --timeout may be less."""


@dataclass(kw_only=True)
class ElasticMeeting:
    """One node's way into an elastic job. `run` fills `offers`, or `remote_state` where the job runs already."""

    request: LaunchRequest
    timeout_s: float
    offer: NodeOffer
    key: bytes = field(repr=False)
    offers: list[NodeOffer] = field(default_factory=list)
    """Of the nodes that begin together, by node."""

    remote_state: dict[str, Any] = field(default_factory=dict)
    """What the nodes of a running job know."""

    early: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Messages that came before this node's ranks were started."""

    _seen: dict[int, NodeOffer] = field(default_factory=dict)
    _came_at: float = field(default_factory=time.monotonic)
    _problem: Exception | None = None

    def __post_init__(self) -> None:
        assert self.request.elastic is not None
        self.nodes, self.limits, self.port = self.request.nodes, self.request.elastic, self.request.meeting_port
        self._seen[self.nodes.rank] = self.offer
        addresses = dict(enumerate(self.nodes.hosts)) | {self.nodes.rank: self.nodes.address}
        self.mesh = NodeMesh(
            node=self.nodes.rank,
            addresses={node: (address, self.port) for node, address in addresses.items()},
            node_count=self.nodes.count,
            listening=machine.bind(self.nodes.address, self.port, flag="--http-port", listen=True),
            key=JobKey(self.key),
            hello=self._hello,
            on_connect=self._on_connect,
            on_message=self._on_message,
        )

    def _hello(self) -> dict[str, Any]:
        addresses = {node: list(address) for node, address in self.mesh.addresses.items()}
        return {"offer": self.offer.to_json(), "addresses": list(addresses.items())}

    def _on_connect(self, node: int, hello: dict[str, Any]) -> None:
        try:
            offer = NodeOffer.from_json(hello["offer"])
            check_terms(sorted([self.offer, offer], key=lambda offered: offered.node_rank))
        except LaunchError as error:
            self._problem = error
            return
        for other, address in hello["addresses"]:
            self.mesh.add_node(int(other), parse_address(address))
        self._seen[node], self._came_at = offer, time.monotonic()

    def _on_message(self, node: int, message: dict[str, Any]) -> None:
        try:
            self._take(node, message)
        except LaunchError as error:
            self._problem = error
        except UNREADABLE as error:
            logger.warning("node %d sent %.200r, which this version does not know (%r)", node, message, error)

    def _take(self, node: int, message: dict[str, Any]) -> None:
        if "form" in message:
            self._join_form([NodeOffer.from_json(offer) for offer in message["form"]])
        elif "state" in message and message["state"]["view"] is not None:
            self.remote_state = message["state"]
        elif "refuse" in message:
            self._problem = PeerLostError(f"node {node}: {message['refuse']}")
        else:
            self.early.append((node, message))

    def _join_form(self, offers: list[NodeOffer]) -> None:
        """Begin with nodes that may have met before this one knew where they are."""
        if self.offer not in offers:
            return  # they began without this launcher, and will tell it what they do
        for offer in offers:
            self.mesh.add_node(offer.node_rank, (offer.address, self.port))
        self.offers = offers

    def run(self, stops: StopSignals, server: ForkServerHandle) -> int:
        """Meet the others; returns the number of a signal that ended it, or 0.

        Raises:
            LaunchError: If another node was started with other terms.
            PeerLostError: If too few nodes came.
        """
        logger.info("meeting up to %d nodes; listening at %s:%d", self.nodes.count, self.nodes.address, self.port)
        started = reported_at = time.monotonic()
        while not self.offers and not self.remote_state:
            if number := stops.take():
                return number
            self._poll(server)
            now = time.monotonic()
            if self._problem is not None:
                self._end_with_others(self._problem)
            if self._may_begin(now):
                self._begin()
            elif now - started > self.timeout_s + LAST_CALL_S or (
                now - started > self.timeout_s and len(self._present) < self.limits.least_nodes
            ):
                raise PeerLostError(self._too_few())
            if now - reported_at > REPORT_EVERY_S:
                reported_at = now
                logger.info(tr("not ready endpoints:{names} ({why})", names=self._missing(), why=tr("not started yet")))
        return 0

    def _poll(self, server: ForkServerHandle) -> None:
        with selectors.DefaultSelector() as ready:
            self.mesh.register(ready)
            for key, _ in ready.select(POLL_S):
                key.data()
        self.mesh.update(time.monotonic())
        if select.select([server.socket], [], [], 0)[0]:
            server.receive()

    @property
    def _present(self) -> set[int]:
        return self.mesh.connected | {self.nodes.rank}

    def _may_begin(self, now: float) -> bool:
        """Whether this node, the lowest that is here, begins the job with those that are."""
        present = self._present
        if self.nodes.rank != min(present) or not present <= self._seen.keys():
            return False
        if len(present) == self.nodes.count:
            return True
        if len(present) < self.limits.least_nodes or now - self._came_at < min(LAST_CALL_S, self.timeout_s):
            return False
        # Nodes that do not answer may be at work beyond a cut; those that refuse have not been started.
        return is_quorum(range(self.nodes.count), present, self.mesh.ended)

    def _begin(self) -> None:
        self.offers = [self._seen[node] for node in sorted(self._present)]
        for node in self.mesh.connected:
            self.mesh.send(node, {"form": [offer.to_json() for offer in self.offers]})

    def _missing(self) -> list[str]:
        return [self.nodes.name(node) for node in range(self.nodes.count) if node not in self._present]

    def _too_few(self) -> str:
        count = len(self._present)
        if mismatched := self.mesh.mismatched:
            return tr(
                "{nodes} came with another PHALANX_JOB_SECRET. Set the same value on every node.",
                nodes=", ".join(f"node {node} ({host})" for node, host in sorted(mismatched.items())),
            )
        if count >= self.limits.least_nodes:
            return (
                f"Nodes {', '.join(self._missing())} do not answer, and may train without this one. Start the job "
                "where they can be reached, or leave them out of --ips and --nnodes."
            )
        return tr(
            "{missing} of {total} hosts did not come within {timeout_s:g} s: {names}. Start the job there "
            "too; --timeout changes how long to wait.",
            missing=self.nodes.count - count,
            total=self.nodes.count,
            timeout_s=self.timeout_s,
            names=", ".join(self._missing()),
        )

    def _end_with_others(self, problem: Exception) -> None:
        """Raise once the others have had the time to see the same."""
        self.mesh.close()
        raise problem


def meeting_key(nodes: Nodes, variables: Mapping[str, str]) -> bytes:
    """Return what launchers of an elastic job know each other by; empty where the user gave no secret.

    Launchers on loopback addresses of this host share a file of this user.
    """
    secret = Environment(variables).secret("PHALANX_JOB_SECRET")
    if not secret and all(network.is_loopback(host) for host in (*nodes.hosts, nodes.address)):
        return own_secret().encode()
    return secret
