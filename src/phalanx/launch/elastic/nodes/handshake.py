"""`Handshakes`: connections whose other end has not proved yet that it is a launcher of the job.

dialling -> listening   {"hello": node, listens, launch, nonce, ...}
listening -> dialling   {"hello": the same, proof}
dialling -> listening   {"proof"}
or, from a node that is to be dialled itself: {"knock": node, listens, launch, proof}
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.launch.elastic.channel import UNREADABLE, MemberChannel
from phalanx.launch.elastic.nodes.job_key import Address, JobKey, parse_address

logger = logging.getLogger("phalanx.launch")

HANDSHAKE_S = 5.0
SPARE_HANDSHAKES = 16
"""Connections of unknown origin that may be open beyond one of each node."""


@dataclass(slots=True)
class Handshake:
    """One of them."""

    channel: MemberChannel
    deadline: float
    node: int
    """The node that was dialled; -1 for one that dialled here."""

    host: str
    """Address of the other end."""

    nonce: str
    hello: dict[str, Any] | None = None
    """What the other end says of itself."""

    @property
    def is_ours(self) -> bool:
        """Whether it was dialled here."""
        return self.node != -1


@dataclass
class Handshakes:
    """Those of one node."""

    node: int
    node_count: int
    key: JobKey
    describe_node: Callable[[], dict[str, Any]]
    """Returns where this node listens and which launcher it is."""

    hello: Callable[[], dict[str, Any]]
    """Returns what else a node is told first."""

    on_proof: Callable[[int, Handshake, list[dict[str, Any]]], None]
    """Called with a node that has proved that it is of the job, and with messages that came after its proof."""

    on_knock: Callable[[int, Address], None]
    """Called with a node that is to be dialled, and with where it listens."""

    mismatched: dict[int, str]
    """Nodes that came with another secret than the job's, and from which host."""

    pending: list[Handshake] = field(default_factory=list)

    def register(self, ready: selectors.BaseSelector) -> None:
        """Add the sockets to what is waited for."""
        for handshake in self.pending:
            if handshake.channel.socket is not None:
                ready.register(handshake.channel.socket, handshake.channel.events, lambda h=handshake: self._serve(h))

    def update(self, now: float) -> None:
        """End those that take too long."""
        for handshake in [each for each in self.pending if now > each.deadline]:
            self._end(handshake)

    def close(self) -> None:
        """Close all."""
        for handshake in self.pending:
            handshake.channel.close()

    def is_pending(self, node: int) -> bool:
        """Return whether one continues that was dialled here."""
        return any(handshake.node == node for handshake in self.pending)

    # How they begin.

    def accept(self, connection: socket.socket, host: str) -> None:
        """Begin one with whoever dialled here."""
        # Whoever opens connections and says nothing must not use up the files of this process.
        strangers = [handshake for handshake in self.pending if not handshake.is_ours]
        if len(strangers) >= self.node_count + SPARE_HANDSHAKES:
            self._end(strangers[0])
        self._begin(MemberChannel(connection, f"{host}, which dialled here,"), -1, host)

    def greet(self, connection: socket.socket, node: int, host: str) -> None:
        """Begin one with a node that was dialled."""
        handshake = self._begin(MemberChannel(connection, f"node {node}"), node, host)
        handshake.channel.send({"hello": self._own_hello(handshake)})

    def knock(self, connection: socket.socket) -> None:
        """Tell a node where to dial."""
        values = self.describe_node()
        proof = self.key.proof("knock", *_knock_parts(values))
        with contextlib.suppress(OSError):
            connection.send(json.dumps({"knock": {**values, "proof": proof}}).encode() + b"\n")
        connection.close()

    def _begin(self, channel: MemberChannel, node: int, host: str) -> Handshake:
        handshake = Handshake(channel, time.monotonic() + HANDSHAKE_S, node, host, secrets.token_hex(16))
        self.pending.append(handshake)
        return handshake

    # How they continue.

    def _serve(self, handshake: Handshake) -> None:
        if handshake not in self.pending:
            return
        handshake.channel.flush()
        messages = handshake.channel.receive()
        for position, message in enumerate(messages):
            try:
                if self._take(handshake, message):
                    assert handshake.hello is not None
                    self.pending.remove(handshake)
                    self.on_proof(int(handshake.hello["node"]), handshake, messages[position + 1 :])
                    return
            except UNREADABLE:
                self._end(handshake)
                return
        if handshake.channel.socket is None:
            self._end(handshake)

    def _take(self, handshake: Handshake, message: dict[str, Any]) -> bool:
        """Take one message; returns whether the other end is one of the job."""
        if "proof" in message and handshake.hello is not None and not handshake.is_ours:
            nonces = handshake.nonce, handshake.hello["nonce"]
            self._check(handshake, int(handshake.hello["node"]), message["proof"], "dial", *nonces)
            return True
        if "knock" in message:
            self._take_knock(handshake, message["knock"])
            raise ValueError("it will be dialled")
        hello = message["hello"]
        node, nonce = int(hello["node"]), str(hello["nonce"])
        if not 0 <= node < self.node_count or node == self.node or (handshake.is_ours and node != handshake.node):
            raise ValueError(f"node {node} is another")
        hello["listens"] = parse_address(hello["listens"])
        handshake.hello = hello
        if not handshake.is_ours:
            proof = self.key.proof("accept", nonce, handshake.nonce)
            handshake.channel.send({"hello": {**self._own_hello(handshake), "proof": proof}})
            return False
        # Sent also where the other has another secret: it is to see that too.
        handshake.channel.send({"proof": self.key.proof("dial", nonce, handshake.nonce)})
        self._check(handshake, node, hello["proof"], "accept", handshake.nonce, nonce)
        return True

    def _take_knock(self, handshake: Handshake, knock: dict[str, Any]) -> None:
        node, address = int(knock["node"]), parse_address(knock["listens"])
        if not 0 <= node < self.node_count or node == self.node:
            return
        self._check(handshake, node, knock["proof"], "knock", *_knock_parts(knock))
        self.on_knock(node, address)

    def _own_hello(self, handshake: Handshake) -> dict[str, Any]:
        return {**self.hello(), **self.describe_node(), "nonce": handshake.nonce}

    def _check(self, handshake: Handshake, node: int, proof: object, purpose: str, *parts: object) -> None:
        """Raise ValueError if the other end, which says that it is `node`, does not know the job's secret."""
        if self.key.is_proof(proof, purpose, *parts):
            self.mismatched.pop(node, None)
            return
        if self.mismatched.get(node) != handshake.host:
            self.mismatched[node] = handshake.host
            logger.warning(
                "a launcher at %s that says it is node %d does not know this job's PHALANX_JOB_SECRET; it is refused",
                handshake.host,
                node,
            )
        raise ValueError(f"node {node} has another secret")

    def _end(self, handshake: Handshake) -> None:
        if handshake in self.pending:
            self.pending.remove(handshake)
        handshake.channel.close()


def _knock_parts(knock: dict[str, Any]) -> tuple[object, ...]:
    return knock["node"], *knock["listens"], knock["launch"]
