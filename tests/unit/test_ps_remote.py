"""A store over servers, whose servers are services in this process: what it asks them, and how it shares keys out."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from typing import ClassVar

import numpy as np
import pytest

import ps_simulator as sim
from phalanx import _core
from phalanx.errors import BackendError, ConfigError, PhalanxError
from phalanx.ps.server.service import Service
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.local import LocalStore
from phalanx.ps.stores.partition import ServerPart, partitioned_request
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.wire import frame
from phalanx.ps.wire.data_frame import PUSH_HEAD, DataRequest
from phalanx.ps.wire.frame import FrameKind
from phalanx.ps.wire.message import RpcRequest, _raised


class DirectConnection:
    """A connection that asks its service at once and remembers what was asked: the operation and its arguments."""

    services: ClassVar[list[Service]] = []
    refused: ClassVar[list[PhalanxError]] = []
    """Errors that come in place of answers to pushes."""

    def __init__(self, endpoint, *, secret, me, peer, client, timeout_s, connect_s, retry_s, has_moved, lock):
        self.lock = lock
        self.service, self.client, self.me = self.services[int(endpoint)], client, me
        self.seq = itertools.count(1)
        self.asked = []
        self.context = _core.ServerContext(
            self.service.engine, "server", 1 << 30, _core.MemoryBudget(1 << 30), pytest.fail
        )

    def send(self, op, meta, arrays=(), reply_bytes=0):
        self.asked.append((op, dict(meta)))
        request = RpcRequest(op, dict(meta), [a.copy() for a in arrays], self.client, next(self.seq), self.me)
        try:
            reply = self.service.handle(request)
        except PhalanxError as error:
            return Answered(error)
        assert sum(a.nbytes for a in reply.arrays) <= reply_bytes
        return Answered(reply)

    def post(self, request):
        raw = request.encode(None)
        step, pushes = struct.unpack_from("<Q", raw)[0], struct.unpack_from("<I", raw, 36)[0]
        named = [PUSH_HEAD.unpack_from(raw, 48 + 40 * k)[1] != 0 for k in range(pushes)]
        self.asked.append((request.op, {"step": step, "named": named}))
        if request.op == "push" and self.refused:
            return Answered(self.refused.pop())
        payload = np.empty(request.payload_bytes, np.uint8)
        request.write(payload)
        kind, raw, rows = self.context.answer(
            self.me, self.client, request.kind, next(self.seq), raw, payload, lambda *_: None
        )
        if kind == FrameKind.ERROR:
            return Answered(_raised(frame.parse_object(raw), "server"))
        return Answered(request.decode_reply(FrameKind(kind), raw, len(rows), lambda at, count: rows))

    takes_native = is_written = False

    def take_over(self):
        pass

    def call(self, op, meta, arrays=(), reply_bytes=0):
        return self.send(op, meta, arrays, reply_bytes).result()

    def close(self):
        self.asked.append(("close", {}))


class Answered:
    def __init__(self, reply):
        self.reply = reply

    def result(self):
        if isinstance(self.reply, PhalanxError):
            raise self.reply
        return self.reply


def remote(servers, worker=0, workers=1, mode="async"):
    DirectConnection.services = servers
    endpoints = [str(rank) for rank in range(len(servers))]
    return RemoteStore(endpoints, secret=b"", worker=worker, workers=workers, mode=mode)


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setattr("phalanx.ps.stores.remote.Connection", DirectConnection)
    yield
    DirectConnection.services = []  # else the native core ends before the servers of the last test, and says so


def made(servers=1, **about):
    services = [Service(rank, servers) for rank in range(servers)]
    store = remote(services, **about)
    store.declare([sim.SPEC])
    return services, store


def asked(store, op):
    return [[meta for o, meta in c.asked if o == op] for c in store._connections]


KEYS = np.arange(40, dtype=np.int64)
VALUES = np.arange(120, dtype=np.float32).reshape(40, 3)


@pytest.mark.parametrize("servers", [1, 3])
def test_rows_come_back_in_the_order_of_the_keys_whoever_owns_them(servers):
    services, store = made(servers)
    store.push([TableUpdate("ids", KEYS, VALUES, kind="assign")])
    for order in (KEYS, KEYS[::-1].copy(), np.array([7, 31], np.int64), KEYS[:0]):
        (rows,) = store.pull([PullSpec("ids", order)], step=1).rows()
        np.testing.assert_array_equal(rows, VALUES[order])
    assert sum(service.state.tables.tables["ids"].rows for service in services) == len(KEYS)
    assert all(service.state.tables.tables["ids"].rows for service in services)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_push_names_the_pull_that_brought_its_keys(servers):
    _, store = made(servers)
    pulled = store.pull([PullSpec("ids", KEYS)])
    store.pull([PullSpec("ids", KEYS[:2])]).rows()
    pulled.rows()
    store.push([TableUpdate("ids", KEYS.copy(), VALUES)])
    store.push([TableUpdate("ids", KEYS[::-1].copy(), VALUES[::-1].copy())], step=1)
    (rows,) = store.pull([PullSpec("ids", KEYS)], step=2).rows()
    np.testing.assert_allclose(rows, sim.START - 2 * sim.LR * VALUES, rtol=1e-6)
    for of_server in asked(store, "push"):
        assert [meta["named"] for meta in of_server] == [[True], [False]]


@pytest.mark.parametrize("servers", [1, 3])
def test_each_change_of_a_push_names_the_pull_of_its_own_keys(servers):
    _, store = made(servers)
    store.declare([dataclasses.replace(sim.SPEC, name="dense", dense=40), dataclasses.replace(sim.SPEC, name="more")])
    store.pull([PullSpec("dense", KEYS)]).rows()
    store.pull([PullSpec("more", KEYS)]).rows()
    store.pull([PullSpec("ids", KEYS)]).rows()
    store.push(
        [
            TableUpdate("ids", KEYS, VALUES),
            TableUpdate("dense", KEYS, VALUES),
            TableUpdate("more", KEYS[:3], VALUES[:3]),
        ]
    )
    store.push([TableUpdate("ids", KEYS, VALUES)], step=1)
    rows, more = store.pull([PullSpec("ids", KEYS), PullSpec("more", KEYS[:3])], step=2).rows()
    np.testing.assert_allclose(rows, sim.START - 2 * sim.LR * VALUES, rtol=1e-6)
    np.testing.assert_allclose(more, sim.START - sim.LR * VALUES[:3], rtol=1e-6)
    for of_server in asked(store, "push"):
        assert [meta["named"] for meta in of_server] == [[True, True, False], [False]]


def test_a_server_that_forgot_the_pull_gets_the_keys():
    (service,), store = made()
    pulled = store.pull([PullSpec("ids", KEYS)])
    pulled.rows()
    service.engine.forget_pulls()
    store.push([TableUpdate("ids", KEYS, VALUES)])
    late = store.pull([PullSpec("ids", KEYS)], step=1)
    np.testing.assert_allclose(late.rows()[0], sim.START - sim.LR * VALUES, rtol=1e-6)
    assert [meta["named"] for meta in asked(store, "push")[0]] == [[True], [False]]


def test_a_push_that_was_refused_is_sent_again_and_nothing_is_lost():
    (service,), store = made()
    DirectConnection.refused = [BackendError("the disk is full")]
    store.push([TableUpdate("ids", KEYS, VALUES)])
    with pytest.raises(BackendError, match="full"):
        store.pull([PullSpec("ids", KEYS)], step=1).rows()
    (rows,) = store.pull([PullSpec("ids", KEYS)], step=1).rows()
    np.testing.assert_allclose(rows, sim.START - sim.LR * VALUES, rtol=1e-6)
    store.push([TableUpdate("ids", KEYS, VALUES)], step=1)
    store.flush()
    assert service.state.clocks.steps == [2]


def test_several_tables_travel_in_one_request_and_idle_servers_are_not_asked():
    _, store = made(3)
    store.declare([dataclasses.replace(sim.SPEC, name="more", dim=2)])
    one = np.array([5], np.int64)
    first, second = store.pull([PullSpec("ids", KEYS), PullSpec("more", one)]).rows()
    assert (first.shape, second.shape) == ((40, 3), (1, 2))
    assert [len(pulls) for pulls in asked(store, "pull")] == [1, 1, 1]
    store.pull([PullSpec("more", one)]).rows()
    assert sum(len(pulls) for pulls in asked(store, "pull")) == 4
    store.push([TableUpdate("ids", one, VALUES[:1], counts=np.array([3], np.uint32))])
    store.flush()
    assert [len(pushes) for pushes in asked(store, "push")] == [1, 1, 1]
    assert store.report()["ids"].pushed == 1


def test_a_restarted_worker_goes_on_where_the_servers_are():
    services, store = made(2)
    for step in range(3):
        store.push([], step=step)
    # The process died after it had pushed its fourth step to one of two servers.
    push = ServerPart(partitioned_request(1), 0)
    store._connections[0].post(DataRequest(FrameKind.PUSH, push, 3))
    again = remote(services)
    again.declare([sim.SPEC])
    again.push([TableUpdate("ids", KEYS, VALUES)], step=0)
    (rows,) = again.pull([PullSpec("ids", KEYS)], step=1).rows()
    np.testing.assert_allclose(rows, sim.START - sim.LR * VALUES, rtol=1e-6)
    assert [service.state.clocks.steps for service in services] == [[5], [5]]


def test_servers_and_this_process_agree_on_every_row():
    _, store = made(3)
    local = LocalStore()
    local.declare([sim.SPEC])
    for step in range(4):
        keys = sim.keys_of(0, step)
        values = VALUES[: len(keys)] + step
        for each in (store, local):
            each.push([TableUpdate("ids", keys, values, counts=np.ones(len(keys), np.uint32))], step=step)
    np.testing.assert_array_equal(sim.table_of(store), sim.table_of(local))
    ours, theirs = store.report()["ids"], local.report()["ids"]
    assert (ours.rows, ours.pushed) == (theirs.rows, theirs.pushed)
    assert store.shrink("ids") == 0


def test_leases_are_those_of_the_first_server():
    services, store = made(2)
    assert store.lease(0, ["a", "b"]) == ("a", 0, 2)
    store.report_progress(0, "a", 10)
    assert store.lease(0, ["a", "b"]) == ("b", 0, 1)
    assert store.lease(0, ["a", "b"]) == (None, 0, 1)
    assert not services[1].state.leases.to_json()


def test_an_unknown_table_is_named_before_anything_is_sent():
    _, store = made()
    with pytest.raises(ConfigError, match=r"no table 'idz'.*Did you mean 'ids'\?"):
        store.pull([PullSpec("idz", KEYS)])
    assert asked(store, "pull") == [[]]


def test_connections_that_came_are_closed_when_another_does_not():
    opened = []

    class Refusing(DirectConnection):
        def __init__(self, endpoint, **about):
            if endpoint == "1":
                raise ConfigError("refused")
            super().__init__(endpoint, **about)
            opened.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.ps.stores.remote.Connection", Refusing)
        with pytest.raises(ConfigError, match="refused"):
            remote([Service(0, 2), Service(1, 2)])
    assert [c.asked for c in opened] == [[("close", {})]]


@pytest.mark.parametrize("servers", [1, 3])
def test_rows_come_with_the_answer_to_a_push(servers):
    services, store = made(servers)
    store.declare([dataclasses.replace(sim.SPEC, name="dense", dense=40)])
    few = KEYS[::5].copy()
    pulled = store.push([TableUpdate("ids", KEYS, VALUES)], then=[PullSpec("dense", few), PullSpec("ids", few)])
    dense, rows = pulled.rows()
    np.testing.assert_array_equal(dense, np.full((8, 3), sim.START, np.float32))
    np.testing.assert_allclose(rows, sim.START - sim.LR * VALUES[::5], rtol=1e-6)
    assert asked(store, "pull") == [[]] * servers
    assert store.push([], step=1).rows() == []
    with pytest.raises(ConfigError, match=r"no table 'idz'.*Did you mean 'ids'\?"):
        store.push([TableUpdate("ids", KEYS, VALUES)], step=2, then=[PullSpec("idz", few)])
    assert [service.state.clocks.steps for service in services] == [[2]] * servers


def test_a_push_of_two_changes_of_one_table_is_refused_before_anything_is_sent():
    (service,), store = made()
    with pytest.raises(ConfigError, match=r"A push has two changes of table 'ids'. Give it one"):
        store.push([TableUpdate("ids", KEYS, VALUES), TableUpdate("ids", KEYS[:1], VALUES[:1])])
    assert asked(store, "push") == [[]]
    store.push([TableUpdate("ids", KEYS, VALUES)])
    store.flush()
    assert service.state.clocks.steps == [1]


def test_rows_come_with_a_push_that_is_sent_again():
    (service,), store = made()
    store.pull([PullSpec("ids", KEYS)]).rows()
    service.engine.forget_pulls()
    pulled = store.push([TableUpdate("ids", KEYS, VALUES)], then=[PullSpec("ids", KEYS[:2])])
    np.testing.assert_allclose(pulled.rows()[0], sim.START - sim.LR * VALUES[:2], rtol=1e-6)
    assert [meta["named"] for meta in asked(store, "push")[0]] == [[True], [False]]
    DirectConnection.refused = [BackendError("the disk is full")]
    pulled = store.push([TableUpdate("ids", KEYS, VALUES)], step=1, then=[PullSpec("ids", KEYS[:2])])
    with pytest.raises(BackendError, match="full"):
        pulled.rows()
    np.testing.assert_allclose(pulled.rows()[0], sim.START - 2 * sim.LR * VALUES[:2], rtol=1e-6)
    assert service.state.clocks.steps == [2]
