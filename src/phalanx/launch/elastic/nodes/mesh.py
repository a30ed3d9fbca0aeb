"""`NodeMesh`: connections between the launchers of an elastic job, and which of them live.

Every launcher listens at its port and dials the nodes before it in the list; at those after it, it knocks, and they
dial here. Messages are JSON lines. Both ends prove that they have the job's secret where there is one. A connection
that breaks is followed by a look at the port: a host that refuses says that the launcher is gone; one that does not
answer may be cut off.
"""

from __future__ import annotations

import errno
import secrets
import select
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.launch.elastic.channel import MemberChannel
from phalanx.launch.elastic.nodes.handshake import Handshake, Handshakes
from phalanx.launch.elastic.nodes.job_key import Address, JobKey

BEAT_S = 0.5
LOST_AFTER_S = 6.0
"""Silence after which a node counts as cut off."""

DIAL_S = 1.0
"""How long a host may take to answer at its port."""

REDIAL_S = 0.5
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
    _handshakes: Handshakes = field(init=False)
    _beat_at: float = 0.0

    def __post_init__(self) -> None:
        if self.listening is not None:
            self.listening.setblocking(False)
        self._handshakes = Handshakes(
            node=self.node,
            node_count=self.node_count,
            key=self.key,
            describe_node=self._describe_node,
            hello=self.hello,
            on_proof=self._connect,
            on_knock=self._take_knock,
            mismatched=self.mismatched,
        )
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
        self._handshakes.register(ready)
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
        self._handshakes.update(now)
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
        self._handshakes.close()
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
        if any(dial.node == node for dial in self._dials) or self._handshakes.is_pending(node):
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
            self._handshakes.knock(dial.socket)
        else:
            self._handshakes.greet(dial.socket, dial.node, peer.address[0])

    def _accept(self) -> None:
        assert self.listening is not None
        try:
            connection, (host, _) = self.listening.accept()
        except OSError:
            return
        self._handshakes.accept(connection, host)

    def _take_knock(self, node: int, address: Address) -> None:
        """Dial a node that says where it listens."""
        self.add_node(node, address)
        peer = self._nodes[node]
        if peer.status != "connected" and node < self.node:
            peer.address, peer.next_dial = address, 0.0

    def _describe_node(self) -> dict[str, Any]:
        return {"node": self.node, "listens": self.addresses[self.node], "launch": self._launch}

    def _connect(self, node: int, handshake: Handshake, more: list[dict[str, Any]]) -> None:
        """Use a connection whose other end is a launcher of the job."""
        assert handshake.hello is not None
        address: Address = handshake.hello["listens"]
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
