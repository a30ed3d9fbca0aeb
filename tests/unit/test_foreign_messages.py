"""Messages and addresses that others sent, broken in every way: one documented error each, and nobody ends by them."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutations import ODD_DOCUMENTS, ODD_TEXTS, broken_bytes, broken_documents, broken_json, little_memory
from open_files import no_descriptor_left
from phalanx._core import MemoryBudget, ServerContext
from phalanx.addresses import parse_endpoint
from phalanx.cluster.env.environment import MOST_HOSTS, expand_hosts
from phalanx.cluster.rendezvous import Announcement, Expected, meet
from phalanx.cluster.view import Member, View
from phalanx.data.ctr.slots import SlotSchema, parse_slots
from phalanx.errors import ClosedError, ConfigError, InternalError, LaunchError, PeerLostError, PhalanxError, RoleError
from phalanx.launch.elastic.channel import UNREADABLE
from phalanx.launch.elastic.membership import Membership, SizeLimits
from phalanx.launch.elastic.nodes.node_group import NodeGroup
from phalanx.launch.elastic.nodes.probes import NodeProbes
from phalanx.launch.hang.locations import Location
from phalanx.launch.hang.observe import Observation
from phalanx.launch.hang.probes import probe_to_json
from phalanx.launch.hang.stacks import Frame
from phalanx.launch.hang.watch import HangNews, HangSettings, HangWatch
from phalanx.launch.process import wire
from phalanx.launch.process.node_link import _Link, _LinkError
from phalanx.launch.rank.activity import Activity, Call
from phalanx.launch.reports.report import render_hang
from phalanx.launch.reports.root_cause import ProcessExit, first_failure
from phalanx.launch.request.machine import resolve as resolve_host
from phalanx.launch.request.topology import NodeOffer, build_topology
from phalanx.ps.server.service import Service
from phalanx.ps.serving.row_request import read_ids
from phalanx.ps.wire.address import resolve
from phalanx.ps.wire.data_frame import DataReply, DataRequest, DataStatus
from phalanx.ps.wire.frame import FrameError, FrameKind
from phalanx.ps.wire.message import RpcRequest
from phalanx.versions import HAS_NATIVE
from ps_requests import SPEC, FakeWorker, gradient, keys

broken = settings(max_examples=200)

# --- parameter server -------------------------------------------------------------------------------------------------

DECLARED = {"mode": "async", "bound": 0, "workers": 1, "worker": 0, "specs": [SPEC.to_json()]}
REQUESTS: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("declare", DECLARED, []),
    ("shrink", {"table": "items"}, []),
    ("lease", {"epoch": 0, "files": ["a", "b"]}, []),
    ("done", {"epoch": 0, "file": "a", "offset": 3, "end": True}, []),
    ("lease_batches", {"loader": 0, "epoch": 0, "total": 3, "count": 1, "push": 0}, []),
    ("begin", {"loader": 0, "epoch": 0, "number": 0, "push": 1}, []),
    ("fence", {"workers": 1, "worker": 0}, []),
    ("leave", {"pushes": 1}, []),
    ("report", {}, []),
    ("nothing", {}, []),
]
ARRAYS = [
    keys(),
    keys(1, 1, 2**62, -1),
    np.ones((2, 2), np.float32),
    np.ones((2, 3), np.float32),
    np.full((2, 2), np.nan, np.float32),
    np.ones((0, 2), np.float32),
    np.ones((2, 2)),
    np.ones((2, 4), np.float32)[:, ::2],
    np.arange(4)[::2],
    np.array(3),
    np.zeros(3, np.uint8),
]


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any], list[Any]]:
    op, meta, arrays = draw(st.sampled_from(REQUESTS))
    if draw(st.booleans()):
        changed = draw(broken_json(meta))
        meta = changed if isinstance(changed, dict) else {}
    if draw(st.booleans()):
        arrays = draw(st.lists(st.sampled_from(ARRAYS), max_size=4))
    return op, meta, arrays


class Frames:
    """The frames of a worker's pull and pushes: kind, object and payload."""

    def __init__(self) -> None:
        self.all: list[tuple[FrameKind, bytes, bytes]] = []
        worker = FakeWorker(Service())
        worker.ask = self._note  # type: ignore[method-assign]
        worker.pull(1, 2, keep=True)
        worker.push(gradient((1, 2), 1.0), then=[("items", keys(1, 2))])
        worker.push(gradient((1, 2), 1.0), pull=3)

    def _note(self, request: DataRequest, *, seq: int | None = None) -> DataReply:
        payload = np.empty(request.payload_bytes, np.uint8)
        request.write(payload)
        self.all.append((request.kind, request.encode(None), payload.tobytes()))
        return DataReply(DataStatus.NEED_KEYS, 0, 0, payload[:0])


@st.composite
def frames(draw: st.DrawFn) -> tuple[FrameKind, bytes, bytes]:
    kind, raw, payload = draw(st.sampled_from(Frames().all))
    if draw(st.booleans()):
        raw = draw(broken_bytes(raw))
    if draw(st.booleans()):
        payload = draw(broken_bytes(payload))
    return kind, raw, payload


@broken
@given(asked=st.lists(requests(), min_size=1, max_size=4), client=st.sampled_from([100, 0, 2**64 - 1]))
def test_no_request_makes_a_server_fail(asked: list[tuple[str, dict[str, Any], list[Any]]], client: int) -> None:
    service = Service()
    FakeWorker(service).declare()
    with little_memory():
        for seq, (op, meta, arrays) in enumerate(asked, 2):
            # What is not here yet is not waited for: its worker is gone.
            request = RpcRequest(op, meta, list(arrays), client, seq, "worker 0", report_wait=gone)
            with suppress(PhalanxError):
                service.handle(request)
    assert service.failure is None
    assert not service.stopped.is_set()
    assert FakeWorker(service).call("report", {}).meta["tables"].keys() >= {"items"}


@broken
@given(asked=st.lists(frames(), min_size=1, max_size=4), client=st.sampled_from([100, 0, 2**64 - 1]))
def test_no_pull_or_push_makes_a_server_fail(asked: list[tuple[FrameKind, bytes, bytes]], client: int) -> None:
    service = Service()
    FakeWorker(service).declare()
    context = ServerContext(service.engine, "server 0", 1 << 20, MemoryBudget(1 << 20), pytest.fail)
    with little_memory():
        for seq, (kind, raw, payload) in enumerate(asked, 2):
            with suppress(FrameError, ConnectionError):
                context.answer("worker 0", client, kind, seq, raw, np.frombuffer(bytearray(payload), np.uint8), gone)
    assert service.failure is None
    assert not service.stopped.is_set()
    FakeWorker(service).pull(1)


def gone(waits_for: str, is_connected: bool) -> None:
    raise ClosedError(f"nobody waits for {waits_for}")


@broken
@given(
    body=broken_documents({"ids": [1, "-2"]}) | broken_documents({"texts": ["a"], "salt": "b", "hash_space": 9}),
    content_type=st.sampled_from(["application/json", "application/octet-stream", ""]),
)
def test_a_request_for_rows_that_asks_for_none(body: bytes, content_type: str) -> None:
    with little_memory(), suppress(ConfigError):
        ids = read_ids(body, content_type)
        assert (ids.dtype, ids.ndim) == (np.int64, 1)


# --- launchers of several hosts ---------------------------------------------------------------------------------------

OFFER = NodeOffer(
    node_rank=0, address="10.0.0.1", hostname="a", endpoints={"worker": ["10.0.0.1:1"]}, job_id="j", terms={"-n": "1"}
).to_json()
EXIT = ProcessExit(
    title="rank 0", role="worker", rank=0, host="a", pid=1, code=-9, time=1.0, log_file="l", last_lines=("x",)
).to_json()


@broken
@given(value=broken_json(OFFER))
def test_an_offer_of_another_host_that_is_none(value: Any) -> None:
    with suppress(LaunchError):
        offer = NodeOffer.from_json(value)
        build_topology([offer], 0, {}, "log")


@broken
@given(value=broken_json(json.loads(json.dumps(EXIT))))
def test_a_failure_of_another_host_that_is_none(value: Any) -> None:
    with suppress(PeerLostError):
        first_failure([ProcessExit.from_json(value)])


class Store(dict[str, bytes]):
    """As much of torch's store as a link uses."""

    def check(self, names: list[str]) -> bool:
        return all(name in self for name in names)

    def get(self, name: str) -> bytes:
        return self[name]

    def set(self, name: str, value: str | bytes) -> None:
        self[name] = value.encode() if isinstance(value, str) else value

    def add(self, name: str, count: int) -> int:
        return 1


@broken
@given(
    offer=broken_documents(OFFER),
    failed=broken_documents([EXIT]),
    refused=st.none() | st.binary(max_size=9),
)
def test_a_store_that_others_write_to_ends_a_link_with_a_sentence(
    offer: bytes, failed: bytes, refused: bytes | None
) -> None:
    """The store asks for no password: whoever reaches its port may write there."""
    ours, launcher = wire.pair()
    store = Store({"0/offer/1": offer, "0/failed/1": failed, "bye/0": b"1", "bye/1": b"1"})
    if refused is not None:
        store["refused"] = refused
    link = _Link(ours, store, 1, 0, 2, 60.0, ["10.0.0.1", "10.0.0.2"], ["a", "b"])
    with ours, launcher, suppress(_LinkError):
        link._handle_message({"offer": OFFER, "attempt": 0})
        link._poll_store()
        link._poll_store()


def seen(rank: int, **more: Any) -> dict[str, Any]:
    """What a launcher saw of its rank: it waits in a collective, but for `more`."""
    call = Call(
        verb="all_reduce", number=7, group="0", members=(0, 1), since=time.monotonic() - 60.0, detail="float32[8]"
    )
    values = {
        "activity": Activity(looked_at=time.monotonic(), steps=9, begun={"0": 7}, completed={"0": 6}, calls=(call,)),
        "location": Location(kind="collective", verb="all_reduce", frames=(Frame(file="t.py", line=9, function="f"),)),
        "troubles": ("it is stopped",),
    }
    rank_seen = Observation(
        **{"title": f"rank {rank}", "role": "worker", "pid": 1, "at": time.monotonic(), **values, **more}
    )
    return probe_to_json([rank_seen], 1.0)


LOOK = json.loads(json.dumps([seen(0), seen(1, is_stopped=True)]))


class Launchers:
    """Those of other hosts."""

    def request_probe(self) -> None:
        """Nothing: what they saw comes anyway."""

    def publish_probe(self, number: int, observed: dict[str, Any]) -> None:
        """Nothing: they do not read it."""


def report(everywhere: list[dict[str, Any]]) -> HangNews | None:
    watch = HangWatch(HangSettings(after_s=1.0, timeout_s=0.0), Launchers())
    watch.receive_probe({"probe": 1, "everywhere": everywhere})
    watch._join_probes(Launchers(), [], [])
    return watch.take()


def test_what_all_launchers_saw_is_judged() -> None:
    news = report(LOOK)
    assert news is not None
    assert news.verdict.culprits == ("rank 1",)


@pytest.mark.parametrize("now", ["-inf", 1.7e308, "nan"])
def test_times_that_no_clock_shows_are_no_report(now: Any) -> None:
    assert report([{**node, "now": now} for node in LOOK]) is None


@broken
@given(everywhere=broken_json(LOOK))
def test_what_another_launcher_saw_is_a_report_that_can_be_shown_or_nothing(everywhere: Any) -> None:
    with little_memory():
        if (news := report(everywhere)) is not None:
            render_hang(news.verdict, 1.0).encode()
            json.dumps(news.verdict.to_json(), allow_nan=False)


@broken
@given(
    message=broken_json({"probe": {"number": 1, "epoch": 0}})
    | broken_json({"observed": {"number": 1, "epoch": 0, "seen": LOOK[0]}}),
)
def test_a_look_that_another_launcher_asks_for_or_answers_in_an_odd_way(message: Any) -> None:
    """Later looks are complete: what is odd is left out."""
    views: list[dict[str, Any]] = []
    group = TwoNodes()
    looks = NodeProbes(cast(NodeGroup, group), views.append)
    with suppress(*UNREADABLE):  # which the group logs
        if "probe" in message or "observed" in message:
            looks.take(1, message)
    looks._began_at = float("-inf")  # seconds later
    views.clear()
    looks.request_probe()
    looks.update()
    number = views[-1]["probe"]
    looks.publish_probe(number, LOOK[0])
    looks.take(1, {"observed": {"number": number, "epoch": 0, "seen": LOOK[1]}})
    looks.update()
    assert views[-1] == {"probe": number, "everywhere": LOOK}


class TwoNodes:
    """The first of two nodes with a rank each, that is told what the test says."""

    node = 0

    def __init__(self) -> None:
        members = tuple(Member(id=f"n{node}.0", host="h", pid=1, log="", node=node) for node in range(2))
        self.membership = Membership(SizeLimits(1, 2))
        self.membership.adopt(View(epoch=0, members=members, store="h:1", reason="", planned=True))

    def broadcast(self, message: dict[str, Any]) -> None:
        """Nothing: the other node answers by itself."""


@broken
@given(data=st.sampled_from(ODD_DOCUMENTS[1:]) | broken_documents({"exited": "worker.0", "status": 0}).filter(bool))
def test_a_message_between_processes_of_a_launcher_that_is_none(data: bytes) -> None:
    ours, theirs = wire.pair()
    with ours, theirs:
        theirs.send(data)
        with suppress(InternalError):
            message = wire.receive(ours)
            assert message is not None
            assert isinstance(message[0], dict)


@pytest.mark.parametrize("size", [0, 60_000, 70_000, 5_000_000])
def test_a_message_of_any_size_arrives_with_its_descriptors(size: int) -> None:
    """Endings of all ranks of a large job, with tracebacks, are megabytes; a socket takes a tenth of that."""
    message = {"failures": ["é" * size], "attempt": 0}
    with no_descriptor_left():
        ours, theirs = wire.pair()
        with ours, theirs, open(os.devnull, "rb") as file:
            wire.send(theirs, message, [file.fileno()])
            received = wire.receive(ours)
            assert received is not None
            assert received[0] == message
            (descriptor,) = received[1]
            assert os.fstat(descriptor).st_rdev == os.fstat(file.fileno()).st_rdev
            os.close(descriptor)


def test_descriptors_that_come_with_no_message_are_closed() -> None:
    with no_descriptor_left():
        ours, theirs = wire.pair()
        with ours, theirs, open(os.devnull, "rb") as file:
            socket.send_fds(theirs, [b"not a message"], [file.fileno()] * 3)
            with pytest.raises(InternalError, match="A process of the launcher sent b'not a message'"):
                wire.receive(ours)


class Texts:
    """A store in memory, for a rendezvous."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values

    def set_once(self, key: str, value: str) -> str:
        return self._values.setdefault(key, value)

    def get(self, key: str) -> str:
        return self._values[key]

    def has(self, keys: Any) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Any, seconds: float) -> bool:
        return self.has(keys)


ANNOUNCED = json.loads(Announcement(rank=1, host="b", pid=2).to_json())


@broken
@given(
    there=broken_documents(ANNOUNCED),
    verdict=st.none() | st.just(b"go") | broken_documents({"kind": "lost", "message": "m"}),
    at=st.sampled_from(["here/0", "here/1"]),
)
def test_a_rendezvous_over_a_store_that_others_write_to(there: bytes, verdict: bytes | None, at: str) -> None:
    values = {"here/1": json.dumps(ANNOUNCED), at: there.decode(errors="replace")}
    if verdict is not None:
        values["verdict"] = verdict.decode(errors="replace")
    ticks = iter(range(10**6))
    with suppress(ConfigError, PeerLostError):
        meet(
            Texts(values),
            Announcement(rank=0, host="a", pid=1),
            [Expected(rank=0), Expected(rank=1)],
            timeout_s=3,
            clock=lambda: float(next(ticks)),
            log_line=lambda line: None,
            probe=lambda endpoint: "",
        )


# --- addresses and lists of hosts -------------------------------------------------------------------------------------

ODD_ENDPOINTS = [
    "a:٣",
    "a:²",
    "[::1]:80",
    "[]:1",
    ":1",
    "a:",
    "a:+1",
    "a:1_0",
    "a: 1",
    "x" * 70 + ".com:1",
    "a..b:1",
    "\0:1",
]


@broken
@given(
    text=st.text(max_size=20) | st.sampled_from(ODD_TEXTS + ODD_ENDPOINTS),
    port=st.text(max_size=6) | st.sampled_from(ODD_TEXTS),
)
def test_an_endpoint_is_host_and_port_or_none(text: str, port: str) -> None:
    for endpoint in (text, f"{text}:{port}"):
        address = parse_endpoint(endpoint)
        if address is not None:
            assert 1 <= address[1] <= 65535
            assert endpoint.endswith(str(address[1]).zfill(len(endpoint.rpartition(":")[2])))


@pytest.mark.parametrize("text", ["x" * 70 + ".com:1", "a..b:1", "\0:1", "a:²", "a:" + "9" * 5000, "\ud800:1"])
def test_a_host_that_can_be_no_name_is_named(text: str) -> None:
    with pytest.raises((ConfigError, OSError)):
        resolve(text)
    with pytest.raises(LaunchError):
        resolve_host(text.rpartition(":")[0] + "..")


@broken
@given(st.text(alphabet="ab[]-,0123456789 ²", max_size=24) | st.sampled_from(ODD_TEXTS))
def test_a_list_of_hosts_is_short_or_refused(text: str) -> None:
    with little_memory(), suppress(RoleError):
        assert len(expand_hosts(text)) <= MOST_HOSTS * 24


@pytest.mark.parametrize(
    "text", ["n[1-999999999]", "n[1-999][1-999][1-999]", "n" + "[1]" * 5000, "n[" + "1" * 5000 + "]"]
)
def test_few_letters_do_not_name_a_billion_hosts(text: str) -> None:
    with little_memory(), suppress(RoleError):
        assert len(expand_hosts(text)) == 1


# --- click logs: both parsers -----------------------------------------------------------------------------------------

COLUMNS = b"1\t0.5\t-2e3\tann\tx\n0\t\t.5\t\t\xff\n1\t1e-40\t7.\tb\tc\r\n"
TOKENS = b"1 age:0.5 user:ann item:77 item:78\n0\tprice:-2e3  user:\n0.25 age:1 price:3.5e2\r\n"
NUMBERS = st.from_regex(rb"[-+]?[0-9]{0,25}\.?[0-9]{0,25}([eE][-+]?[0-9]{0,5})?", fullmatch=True)


@pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not installed")
@settings(max_examples=500)
@given(
    text=broken_bytes(COLUMNS, TOKENS)
    | NUMBERS.map(lambda number: b"1\t" + number + b"\t2\ta\tb\n1 age:" + number + b" price:" + number + b"\n")
    | NUMBERS.map(lambda number: number + b"\t1\t2\ta\tb\n" + number + b"\n"),
    label=st.booleans(),
)
def test_both_parsers_of_click_logs_read_whatever_comes_alike(text: bytes, label: bool) -> None:
    for format in ("columns", "tokens"):
        schema = SlotSchema(
            label="label" if label else None, dense=("age", "price"), sparse=("user", "item"), format=format
        )
        native, python = (parse_slots(text, schema, native=native) for native in (True, False))
        assert (native.broken, native.first_broken) == (python.broken, python.first_broken)
        for name in ("label", "dense", "ids", "offsets"):
            one, other = getattr(native.rows, name), getattr(python.rows, name)
            assert (one is None) == (other is None)
            assert one is None or (one.tobytes(), one.shape) == (other.tobytes(), other.shape)


def test_one_line_of_many_megabytes_is_one_broken_line() -> None:
    schema = SlotSchema(dense=("age",), sparse=("user",))
    with little_memory():
        for text in (b"x" * (16 << 20), b"\t" * (1 << 20), b"\n" * (1 << 18)):
            parsed = parse_slots(text, schema)
            assert parsed.first_broken is not None
            assert len(parsed.first_broken.text) <= 40
