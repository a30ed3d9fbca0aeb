"""10,000 broken frames: a server and a client refuse each, hold no memory for it, and continue."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from open_files import no_descriptor_left
from phalanx import _core
from phalanx.errors import PeerLostError
from phalanx.ps.server.service import Service
from phalanx.ps.table.placement import table_salt
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.update_rules import SGD
from phalanx.ps.wire import Connection, RpcReply, RpcRequest, frame
from phalanx.ps.wire import secret as handshake
from phalanx.ps.wire.channel import Channel, UnixChannel
from phalanx.ps.wire.data_frame import PULL_HEAD, PUSH_HEAD, DataStatus
from phalanx.ps.wire.frame import FrameKind
from phalanx.ps.wire.progress import Startup
from phalanx.ps.wire.segments import SharedSegment
from phalanx.ps.wire.server.session import ServerConfig, Session
from ps_requests import FakeWorker
from wiring import SECRET, connected, serving

pytestmark = pytest.mark.dist

BOUND_BYTES = 24 << 20
"""Two chunks of a payload and what numpy and Python need around them."""


def answer(request: RpcRequest) -> RpcReply:
    return RpcReply({"bytes": sum(array.nbytes for array in request.arrays)}, request.arrays[:1])


def engine() -> _core.ServerEngine:
    """Return an engine with the tables that the fuzzer's pulls and pushes name, for client 1."""
    service = Service()
    worker = FakeWorker(service, client=1)
    worker.declare(*(TableSpec(name=name, dim=dim, rule=SGD(lr=1.0)) for name, dim in TABLES.items()))
    return service.engine


class Admitted(Session):
    """A session whose client was let in."""

    def _admit(self) -> None:
        self.admitted, self._client = True, 1


class Victim:
    """A server's session fed by hand, in this thread, until it ends."""

    def __init__(self, kind: type[Session]) -> None:
        self.kind = kind
        self.budget = _core.MemoryBudget(64 << 20)
        nothing, never = (lambda client: None), threading.Event()
        context = _core.ServerContext(engine(), "server 0", 16 << 20, self.budget, pytest.fail)
        self.terms = ServerConfig(
            SECRET,
            "server 0",
            answer,
            16 << 20,
            self.budget,
            5.0,
            context,
            Startup.immediate(),
            never,
            nothing,
            nothing,
        )

    def feed(self, data: bytes, descriptor: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        writer = UnixChannel(ours)
        writer.send([data], descriptor=descriptor)
        ours.shutdown(socket.SHUT_WR)
        self.kind(UnixChannel(theirs), "a test", self.terms).run(lambda where, why: None)
        writer.close()
        assert self.budget.used == 0


def request(content: object, payload: bytes = b"", flags: int = 0, claimed: int | None = None) -> bytes:
    """Return a frame whose header and object are sound, whatever they say."""
    raw = json.dumps(content).encode()
    length = len(payload) if claimed is None else claimed
    head = struct.pack("<4sHBBQQIQ", frame.MAGIC, frame.WIRE_VERSION, FrameKind.REQUEST, flags, 1, 1, len(raw), length)
    checksum = struct.pack("<I", zlib.crc32(raw, zlib.crc32(head)))
    return head + checksum + raw + payload


def sound(arrays: list[frame.Array]) -> bytes:
    layout = frame.layout_of(arrays)
    content = {"op": "pull", "meta": {"step": 1}, "arrays": layout.describe()}
    head = frame.encode(FrameKind.REQUEST, 0, 1, 1, content, layout.payload_bytes)
    return head + b"".join(frame.chunks(layout, arrays))


def packed(
    kind: int, heads: bytes, counts: tuple[int, int], payload: bytes = b"", flags: int = 0, **more: int
) -> bytes:
    """Return a pull or push whose header, checksums and object's length are sound, whatever the object says.

    It is the second request of client 1, which declared the tables with its first.
    """
    segment, size, claimed = (more.get(name, 0) for name in ("segment", "size", "claimed"))
    raw = struct.pack("<QdQQIIII", 0, 1.0, segment, size, more.get("keep", 0), *counts, 0) + heads
    head = struct.pack(
        "<4sHBBQQIQ", frame.MAGIC, frame.WIRE_VERSION, kind, flags, 1, 2, len(raw), claimed or len(payload)
    )
    checksum = struct.pack("<I", zlib.crc32(raw, zlib.crc32(head)))
    tail = struct.pack("<I", zlib.crc32(payload)) if payload else b""
    return head + checksum + raw + payload + tail


TABLES = {"fuzz": 2, "more": 4}
SALT, OTHER_SALT = map(table_salt, TABLES)
KEYS = np.arange(100)
PULL = packed(FrameKind.PULL, PULL_HEAD.pack(SALT, 100, 0), (0, 1), KEYS.tobytes(), keep=1)
PUSH = packed(
    FrameKind.PUSH,
    PUSH_HEAD.pack(SALT, 0, 0.5, 100, 2, 0, 15) + PULL_HEAD.pack(SALT, 8, 0),
    (1, 1),
    KEYS.tobytes() + bytes(32 + 832 + 448 + 448 + 448 + 64),
)
NAMING = packed(FrameKind.PUSH, PUSH_HEAD.pack(OTHER_SALT, 3, 0.0, 4, 4, 1, 0), (1, 0), bytes(64))
SOUND = [sound([]), sound([np.arange(20)]), sound([np.arange(300), np.ones((300, 16), np.float32)]), PULL, PUSH, NAMING]
SIZES = [0, 1, 7, 8, 64, 4 << 20, 15 << 20, 1 << 30, 1 << 40, 1 << 41, 1 << 62, -1, True, 1.5, None, "8"]
SEGMENTS = [[1, 1 << 16], [1, 1 << 30], [0, 1 << 40], [-1, -1], [1], "1", None, [1, 1 << 70], [2, 1 << 16]]


def flipped(chance: random.Random) -> bytes:
    data = bytearray(chance.choice(SOUND))
    for _ in range(chance.choice([1, 1, 2, 8])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def truncated(chance: random.Random) -> bytes:
    data = chance.choice(SOUND)
    return data[: chance.randrange(len(data))]


def noise(chance: random.Random) -> bytes:
    return chance.choice([b"", frame.MAGIC, frame.MAGIC + b"\2\0\1\0", frame.MAGIC + b"\2\0\6\0"]) + chance.randbytes(
        chance.randrange(300)
    )


def lying(chance: random.Random) -> bytes:
    """Say untrue things in a sound frame: sizes that are huge, negative or no sizes, segments that are not there."""
    name, size = chance.choice([("uint8", 1), ("int64", 8)])
    shape = [chance.choice(SIZES) for _ in range(chance.choice([0, 1, 1, 1, 2]))]
    content = {"op": "pull", "meta": {}, "arrays": [[name, shape]], "segment": chance.choice(SEGMENTS)}
    if chance.random() < 0.3:
        content[chance.choice(list(content))] = chance.choice([None, 3, [], {}, [[]], "x", shape])
    claimed = chance.choice([count for count in SIZES if type(count) is int and count >= 0])
    if len(shape) == 1 and type(shape[0]) is int and 0 <= shape[0] < 1 << 60:
        claimed = shape[0] * size
    payload = chance.randbytes(chance.randrange(2000))
    return request(content, payload, chance.choice([0, 0, 1, 2, 3, 255]), claimed)


COUNTS = [0, 1, 2, 100, 1 << 16, 1 << 20, (1 << 32) - 1]


def lying_packed(chance: random.Random) -> bytes:
    """Say untrue things in a sound pull or push: counts of tables, rows and values that the payload does not have."""
    pushes, pulls = (chance.choice([0, 0, 1, 1, 2, 3]) for _ in range(2))
    heads = b"".join(
        PUSH_HEAD.pack(
            chance.choice([SALT, OTHER_SALT, 1 << 63]),
            chance.choice([0, 0, 5]),
            0.1,
            chance.choice(COUNTS),
            chance.choice(COUNTS),
            chance.choice([0, 1, 2, 3, 255]),
            chance.choice([0, 1, 7, 15, 16, 255]),
        )
        for _ in range(pushes)
    ) + b"".join(PULL_HEAD.pack(SALT, chance.choice(COUNTS), chance.choice((0, 0, 1, 2))) for _ in range(pulls))
    counts = chance.choice([(pushes, pulls), (pushes, pulls), (chance.choice(COUNTS), chance.choice(COUNTS))])
    return packed(
        chance.choice([FrameKind.PULL, FrameKind.PUSH, FrameKind.ROWS]),
        heads[: chance.choice([len(heads), len(heads), chance.randrange(len(heads) + 1)])],
        counts,
        chance.randbytes(chance.choice([0, 8, 16, 64, 800, 2000])),
        chance.choice([0, 0, 0, 1, 2, 3]),
        keep=chance.choice([0, 1, 2, 1 << 31]),
        segment=chance.choice([0, 1, 1 << 63]),
        size=chance.choice([0, 1 << 16, 1 << 63]),
        claimed=chance.choice([0, 0, 0, 1, 1 << 20, 1 << 40, 1 << 41, 1 << 63]),
    )


def broken(count: int, seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    makers = [noise, truncated, flipped, lying, lying_packed]
    for number in range(count):
        yield makers[number % len(makers)](chance)


@pytest.mark.parametrize("kind", [Session, Admitted], ids=["before the handshake", "after it"])
def test_5000_broken_frames_hold_no_memory_thread_or_descriptor(kind):
    victim = Victim(kind)
    for data in SOUND:
        victim.feed(data)
    threads = set(threading.enumerate())
    with no_descriptor_left():
        tracemalloc.start()
        for data in broken(5000, seed=5):
            victim.feed(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < BOUND_BYTES
    assert set(threading.enumerate()) <= threads


def test_pulls_and_pushes_of_the_fuzzer_are_answered_where_nothing_is_broken():
    replies = []
    for data, rows in ((PULL, 100), (PUSH, 8), (NAMING, 0)):
        ours, theirs = socket.socketpair()
        writer = UnixChannel(ours)
        writer.send([data])
        ours.shutdown(socket.SHUT_WR)
        Admitted(UnixChannel(theirs), "a test", Victim(Admitted).terms).run(lambda where, why: pytest.fail(why))
        header, raw = writer.read_head()
        assert (header.kind, header.seq, len(raw)) == (FrameKind.ROWS, 2, 32)
        assert header.payload_bytes == rows * 2 * 4
        writer.close()
        replies.append(raw[0])
    assert replies == [DataStatus.DONE, DataStatus.DONE, DataStatus.NEED_KEYS]


@pytest.mark.parametrize("segment", SEGMENTS)
def test_a_descriptor_that_comes_with_a_lie_is_closed(segment, caplog):
    victim, shared = Victim(Admitted), SharedSegment(1, 1 << 16)
    assert shared.descriptor is not None
    with no_descriptor_left():
        for flags in (0, frame.SHARED, frame.NEW_SEGMENT, frame.SHARED | frame.NEW_SEGMENT):
            content = {"op": "pull", "meta": {}, "arrays": [["uint8", [100]]], "segment": segment}
            victim.feed(request(content, b"", flags, 100) + SOUND[1], shared.descriptor)
            victim.feed(
                packed(FrameKind.PULL, PULL_HEAD.pack(SALT, 9, 0), (0, 1), flags=flags, claimed=72), shared.descriptor
            )
    shared.forget_descriptor()


def test_memory_that_could_shrink_under_the_server_is_refused():
    victim = Victim(Admitted)
    complaints: list[str] = []
    descriptor = os.memfd_create("unsealed")
    os.ftruncate(descriptor, 1 << 16)
    ours, theirs = socket.socketpair()
    writer = UnixChannel(ours)
    content = {"op": "pull", "meta": {}, "arrays": [["uint8", [100]]], "segment": [1, 1 << 16]}
    writer.send([request(content, b"", 3, 100)], descriptor=descriptor)
    Admitted(UnixChannel(theirs), "a test", victim.terms).run(lambda where, why: complaints.append(why))
    writer.close()
    os.close(descriptor)
    assert complaints == ["a segment could shrink while it is read"]


def test_a_listener_serves_on_after_broken_clients_of_both_kinds():
    with serving(answer) as listener:
        host, port = listener.endpoint.split(":")
        for number, data in enumerate(broken(400, seed=6)):
            with socket.create_connection((host, int(port)), timeout=10) as client:
                if number % 2:
                    greet(Channel(client))
                    client.setblocking(True)
                client.sendall(data)
        with connected(listener) as connection:
            assert connection.call("pull", {}, [np.arange(5)]).meta == {"bytes": 40}


def greet(channel: Channel) -> None:
    mine = handshake.greeting("worker 1", 1)
    handshake.greet(channel, mine, secret=SECRET, peer="server 0", binding=b"", deadline=time.monotonic() + 10)


def test_a_client_gives_up_a_server_that_answers_with_broken_frames():
    replies = [b"", *broken(200, seed=7)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer_with, args=(listening, replies))
        thread.start()
        for _ in replies:
            connection = Connection(
                f"127.0.0.1:{listening.getsockname()[1]}", secret=SECRET, me="worker 1", peer="server 0", timeout_s=10
            )
            with pytest.raises(PeerLostError, match=r"worker 1 asked server 0 at .* for 'pull'"):
                connection.call("pull", {}, reply_bytes=1 << 16)
            connection.close()
            assert not connection.link.thread.is_alive()
        thread.join(10)
    assert not thread.is_alive()


def answer_with(listening: socket.socket, replies: list[bytes]) -> None:
    for reply in replies:
        accepted, _ = listening.accept()
        channel = Channel(accepted)
        mine = handshake.greeting("server 0")
        handshake.admit(channel, mine, secret=SECRET, binding=b"", deadline=time.monotonic() + 10)
        channel.send([reply])
        channel.interrupt(socket.SHUT_WR)
        channel.close()
