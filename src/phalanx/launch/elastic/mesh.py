"""`NodeMesh`: connections between the launchers of an elastic job, and which of them live.

Every launcher listens at its port and dials the nodes before it in the list; at those after it, it knocks, and they
dial here. Messages are JSON lines. Both ends prove that they have the job's secret where there is one. A connection
that breaks is followed by a look at the port: a host that refuses says that the launcher is gone; one that does not
answer may be cut off.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import secrets
import select
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.launch.elastic.channel import UNREADABLE, MemberChannel
from phalanx.launch.elastic.handshake import Address, JobKey, parse_address

logger = logging.getLogger("phalanx.launch")

BEAT_S = 0.5
LOST_AFTER_S = 6.0
"""Silence after which a node counts as cut off."""

DIAL_S = 1.0
"""How long a host may take to answer at its port."""

REDIAL_S = 0.5
HANDSHAKE_S = 5.0
SPARE_HANDSHAKES = 16
"""Connections of unknown origin that may be open beyond one of each node."""

CLOSE_S = 0.5
"""How long the other nodes may take to read what was sent last."""

Status = Literal["unknown", "connected", "broken", "gone", "silent", "left"]
"""`gone`: its host refuses connections, so its launcher has ended. `silent`: nobody knows."""


@dataclass(slots=True)
class _Dial:
    socket: socket.socket
    node: int
    deadline: float


@dataclass(slots=True)
class _Handshake:
    channel: MemberChannel
    deadline: float
    node: int
    """The node that was dialled; -1 for one that dialled here."""

    host: str
    """Address of the other end."""

    nonce: str
    hello: dict[str, Any] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it was dialled here."""
        return self.node != -1


@dataclass(slots=True)
class _Node:
    address: Address
    status: Status = "unknown"
    channel: MemberChannel | None = None
    heard_at: float = 0.0
    why: str = ""
    launch: str = ""
    next_dial: float = 0.0


@dataclass
class NodeMesh:
    """One node's end of the mesh."""

    node: int
    addresses: dict[int, Address]
    """Where each node listens, this one included."""

    node_count: int
    listening: socket.socket | None
    """None in a job of one node."""

    key: JobKey

    hello: Callable[[], dict[str, Any]]
    """Returns what a node is told first."""

    on_connect: Callable[[int, dict[str, Any]], None] = lambda _node, _hello: None
    on_message: Callable[[int, dict[str, Any]], None] = lambda _node, _message: None
    on_restart: Callable[[int], None] = lambda _node: None
    """Called when another launcher has taken the place of one of a node."""

    on_lost: Callable[[int], None] = lambda _node: None
    """Called when a node is found to be gone or silent."""

    mismatched: dict[int, str] = field(default_factory=dict)
    """Nodes that came with another secret than the job's, and from which host."""

    _launch: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells this launcher from one that is started later on the same node."""

    _nodes: dict[int, _Node] = field(default_factory=dict)
    _dials: list[_Dial] = field(default_factory=list)
    _handshakes: list[_Handshake] = field(default_factory=list)
    _beat_at: float = 0.0

    def __post_init__(self) -> None:
        if self.listening is not None:
            self.listening.setblocking(False)
        self._nodes = {node: _Node(address) for node, address in self.addresses.items() if node != self.node}

    def add_node(self, node: int, address: Address) -> None:
        """Learn where a node listens."""
        if node != self.node and node not in self._nodes and 0 <= node < self.node_count:
            self.addresses[node] = address
            self._nodes[node] = _Node(address)

    @property
    def connected(self) -> set[int]:
        """Nodes that messages reach."""
        return {node for node, peer in self._nodes.items() if peer.status == "connected"}

    @property
    def ended(self) -> set[int]:
        """Nodes whose launcher has ended, by word of their host or their own."""
        return {node for node, peer in self._nodes.items() if peer.status in ("gone", "left")}

    def status(self, node: int) -> Status:
        """Return what is known of a node."""
        peer = self._nodes.get(node)
        return "unknown" if peer is None else peer.status

    def launch(self, node: int) -> str:
        """Return what tells a node's launcher from others that were or will be there; "" before it was met."""
        if node == self.node:
            return self._launch
        peer = self._nodes.get(node)
        return "" if peer is None else peer.launch

    def send(self, node: int, message: dict[str, Any]) -> None:
        """Send to one node, if it is connected."""
        peer = self._nodes.get(node)
        if peer is not None and peer.channel is not None:
            peer.channel.send(message)

    def broadcast(self, message: dict[str, Any]) -> None:
        """Send to every connected node."""
        for node in self.connected:
            self.send(node, message)

    def register(self, ready: selectors.BaseSelector) -> None:
        """Add the sockets to what is waited for."""
        if self.listening is not None:
            ready.register(self.listening, selectors.EVENT_READ, self._accept)
        for dial in self._dials:
            ready.register(dial.socket, selectors.EVENT_WRITE, lambda dial=dial: self._finish_dial(dial))
        for handshake in self._handshakes:
            if handshake.channel.socket is not None:
                ready.register(
                    handshake.channel.socket, handshake.channel.events, lambda h=handshake: self._shake_hands(h)
                )
        for node, peer in self._nodes.items():
            if peer.channel is not None and peer.channel.socket is not None:
                ready.register(peer.channel.socket, peer.channel.events, lambda node=node: self._serve(node))

    def update(self, now: float) -> None:
        """Do what is due: beats, connections, silence."""
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self.broadcast({"beat": {}})
        for dial in [dial for dial in self._dials if now > dial.deadline]:
            self._end_dial(dial, "no answer")
        for handshake in [h for h in self._handshakes if now > h.deadline]:
            self._end_handshake(handshake)
        for node, peer in list(self._nodes.items()):
            self._note_break(peer)
            if peer.status in ("connected", "broken") and now - peer.heard_at > LOST_AFTER_S:
                self.drop(node, f"no sign of life for {LOST_AFTER_S:g} s")
            if peer.status != "connected" and now >= peer.next_dial:
                peer.next_dial = now + REDIAL_S
                self._dial(node, now)

    def why(self, node: int) -> str:
        """Return in words why a node is lost, or "" while it is not."""
        peer = self._nodes.get(node)
        if peer is None:
            return ""
        words = {"gone": "is gone: its launcher has ended", "left": "has ended"}
        return f"is gone or cut off: {peer.why}" if peer.status == "silent" else words.get(peer.status, "")

    def drop(self, node: int, why: str) -> None:
        """Count a node that does not answer as lost."""
        peer = self._nodes.get(node)
        if peer is None or peer.status in ("gone", "silent", "left"):
            return
        if peer.channel is not None:
            peer.channel.close()
        peer.channel, peer.status, peer.why = None, "silent", why
        self.on_lost(node)

    def close(self) -> None:
        """Say goodbye and close everything."""
        self.broadcast({"bye": {}})
        for handshake in self._handshakes:
            handshake.channel.close()
        for dial in self._dials:
            dial.socket.close()
        if self.listening is not None:
            self.listening.close()
        channels = [peer.channel for peer in self._nodes.values() if peer.channel is not None]
        for channel in channels:
            channel.end()
        # Whoever closes with something unread resets the connection, and what was sent last may be lost with it.
        until = time.monotonic() + CLOSE_S
        while (waiting := [c.socket for c in channels if c.socket is not None]) and time.monotonic() < until:
            select.select(waiting, [], [], max(0.0, until - time.monotonic()))
            for channel in channels:
                channel.receive()
        for channel in channels:
            channel.close()

    # Connections.

    def _dial(self, node: int, now: float) -> None:
        if any(dial.node == node for dial in self._dials) or any(h.node == node for h in self._handshakes):
            return
        dialling = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        dialling.setblocking(False)
        dial = _Dial(dialling, node, now + DIAL_S)
        self._dials.append(dial)
        try:
            # A loopback address stands for a host in tests, so it is also where we come from.
            dialling.bind((self.addresses[self.node][0], 0))
            result = dialling.connect_ex(self._nodes[node].address)
        except OSError as error:
            result = error.errno or errno.EIO
        if result != errno.EINPROGRESS:
            self._end_dial(dial, "" if result == 0 else errno.errorcode.get(result, "?"))

    def _finish_dial(self, dial: _Dial) -> None:
        if dial in self._dials:
            result = dial.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._end_dial(dial, "" if result == 0 else errno.errorcode.get(result, "?"))

    def _end_dial(self, dial: _Dial, problem: str) -> None:
        self._dials.remove(dial)
        peer = self._nodes[dial.node]
        if problem:
            dial.socket.close()
            if problem == "ECONNREFUSED" and peer.status in ("unknown", "broken", "silent"):
                was_lost = peer.status == "silent"
                peer.status = "gone"
                if not was_lost:
                    self.on_lost(dial.node)
        elif dial.node > self.node or peer.status == "connected":
            # It dials here itself, and may have to learn where.
            proof = self.key.proof("knock", *self._knock_parts(self._place))
            with contextlib.suppress(OSError):
                dial.socket.send(json.dumps({"knock": {**self._place, "proof": proof}}).encode() + b"\n")
            dial.socket.close()
        else:
            channel = MemberChannel(dial.socket, f"node {dial.node}")
            handshake = self._begin_handshake(channel, dial.node, peer.address[0])
            channel.send({"hello": self._own_hello(handshake)})

    def _accept(self) -> None:
        assert self.listening is not None
        try:
            connection, (host, _) = self.listening.accept()
        except OSError:
            return
        # Whoever opens connections and says nothing must not use up the files of this process.
        strangers = [handshake for handshake in self._handshakes if not handshake.is_ours]
        if len(strangers) >= self.node_count + SPARE_HANDSHAKES:
            self._end_handshake(strangers[0])
        self._begin_handshake(MemberChannel(connection, f"{host}, which dialled here,"), -1, host)

    def _begin_handshake(self, channel: MemberChannel, node: int, host: str) -> _Handshake:
        handshake = _Handshake(channel, time.monotonic() + HANDSHAKE_S, node, host, secrets.token_hex(16))
        self._handshakes.append(handshake)
        return handshake

    def _shake_hands(self, handshake: _Handshake) -> None:
        if handshake not in self._handshakes:
            return
        handshake.channel.flush()
        messages = handshake.channel.receive()
        for position, message in enumerate(messages):
            try:
                if self._take_hello(handshake, message):
                    self._connect(handshake, messages[position + 1 :])
                    return
            except UNREADABLE:
                self._end_handshake(handshake)
                return
        if handshake.channel.socket is None:
            self._end_handshake(handshake)

    def _take_hello(self, handshake: _Handshake, message: dict[str, Any]) -> bool:
        """Take one message of a handshake; returns whether the other end is one of the job."""
        if "proof" in message and handshake.hello is not None and not handshake.is_ours:
            nonces = handshake.nonce, handshake.hello["nonce"]
            self._check(handshake, int(handshake.hello["node"]), message["proof"], "dial", *nonces)
            return True
        if "knock" in message:
            self._note_knock(handshake, message["knock"])
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

    def _note_knock(self, handshake: _Handshake, knock: dict[str, Any]) -> None:
        """Dial a node that says where it listens."""
        node, address = int(knock["node"]), parse_address(knock["listens"])
        if not 0 <= node < self.node_count or node == self.node:
            return
        self._check(handshake, node, knock["proof"], "knock", *self._knock_parts(knock))
        self.add_node(node, address)
        peer = self._nodes[node]
        if peer.status != "connected" and node < self.node:
            peer.address, peer.next_dial = address, 0.0

    @staticmethod
    def _knock_parts(knock: dict[str, Any]) -> tuple[object, ...]:
        return knock["node"], *knock["listens"], knock["launch"]

    def _own_hello(self, handshake: _Handshake) -> dict[str, Any]:
        return {**self.hello(), **self._place, "nonce": handshake.nonce}

    @property
    def _place(self) -> dict[str, Any]:
        return {"node": self.node, "listens": self.addresses[self.node], "launch": self._launch}

    def _check(self, handshake: _Handshake, node: int, proof: object, purpose: str, *parts: object) -> None:
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

    def _end_handshake(self, handshake: _Handshake) -> None:
        if handshake in self._handshakes:
            self._handshakes.remove(handshake)
        handshake.channel.close()

    def _connect(self, handshake: _Handshake, more: list[dict[str, Any]]) -> None:
        assert handshake.hello is not None
        node = int(handshake.hello["node"])
        address: Address = handshake.hello["listens"]
        self._handshakes.remove(handshake)
        self.add_node(node, address)
        peer = self._nodes[node]
        peer.address = self.addresses[node] = address  # a pod that comes back has another
        launch = str(handshake.hello["launch"])
        was_restarted, peer.launch = peer.launch not in ("", launch), launch
        if peer.channel is not None:
            peer.channel.close()  # the other end has opened a new one, so the old one is dead
        peer.channel, peer.status, peer.heard_at = handshake.channel, "connected", time.monotonic()
        if was_restarted:
            self.on_restart(node)
        self.on_connect(node, handshake.hello)
        for message in more:
            self._take(node, message)

    def _serve(self, node: int) -> None:
        peer = self._nodes[node]
        channel = peer.channel
        if channel is None:
            return
        channel.flush()
        for message in channel.receive():
            peer.heard_at = time.monotonic()
            self._take(node, message)
        if peer.channel is channel:
            self._note_break(peer)

    def _note_break(self, peer: _Node) -> None:
        """Dial again where a connection broke, be it while something was read or sent."""
        if peer.status == "connected" and (peer.channel is None or peer.channel.socket is None):
            peer.channel, peer.status, peer.next_dial = None, "broken", 0.0

    def _take(self, node: int, message: dict[str, Any]) -> None:
        if "bye" in message:
            peer = self._nodes[node]
            peer.status = "left"
            self.on_lost(node)
        elif "beat" not in message:
            self.on_message(node, message)
