"""Pulls and pushes over real sockets, answered natively: the rows of one process, on every way to a server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from phalanx.errors import ConfigError
from phalanx.ps.server.service import Service
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.local import LocalStore
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.update_rules import SGD
from wiring import SECRET, serving, tcp_only

pytestmark = pytest.mark.dist

SPECS = [TableSpec(name=f"table {i}", dim=1 + 5 * i, rule=SGD(lr=0.5)) for i in range(3)]


@pytest.fixture(params=["unix", "tcp", "tls"])
def way(request, monkeypatch) -> str:
    """Every way to a server of this host; the last two by hiding the Unix socket and treating the host as another."""
    if request.param != "unix":
        monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
    if request.param == "tls":
        monkeypatch.setattr("phalanx.ps.wire.address.is_private", lambda server: False)
    return request.param


@contextmanager
def stores(servers: int, mode: str = "async", workers: int = 1, **options) -> Iterator[list[RemoteStore]]:
    """Give the stores of some workers over servers in this process."""
    services = [Service(rank, servers) for rank in range(servers)]
    made: list[RemoteStore] = []
    with contextmanager(all_serving)(services, options) as endpoints:
        try:
            for worker in range(workers):
                made.append(RemoteStore(endpoints, secret=SECRET, worker=worker, workers=workers, mode=mode))
                made[-1].declare(SPECS)
            yield made
        finally:
            for service in services:
                service.stop()
            for store in made:
                store.close()


def all_serving(services: list[Service], options) -> Iterator[list[str]]:
    if not services:
        yield []
        return
    first, *rest = services
    name = f"server {first.state.server}"
    with (
        serving(first.handle, me=name, data_handler=first.engine, **options) as listener,
        contextmanager(all_serving)(rest, options) as others,
    ):
        yield [listener.endpoint, *others]


def batch(step: int, size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    chance = np.random.default_rng(step)
    keys = [chance.permutation(4 * size)[: size * i] for i in range(len(SPECS))]  # the first table has none
    return keys, [chance.random((len(k), spec.dim), np.float32) for k, spec in zip(keys, SPECS, strict=True)]


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("size", [3, 20_000])
def test_rows_are_those_of_one_process(way, servers, size):
    local = LocalStore()
    local.declare(SPECS)
    with stores(servers) as (store,):
        for step in range(4):
            keys, values = batch(step, size)
            specs = [PullSpec(spec.name, k) for spec, k in zip(SPECS, keys, strict=True)]
            for ours, theirs in zip(store.pull(specs, step=step).rows(), local.pull(specs).rows(), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            updates = [TableUpdate(p.table, p.keys, v, lr=0.1 * step) for p, v in zip(specs, values, strict=True)]
            after = store.push(updates, step=step, then=specs[1:])
            local.push(updates)
            assert store.report()["table 2"].pushed == local.report()["table 2"].pushed
            for ours, theirs in zip(after.rows(), local.pull(specs[1:]).rows(), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_a_push_that_waits_for_another_worker_gets_its_rows_with_the_step(way):
    keys, one = np.arange(2, dtype=np.int64), np.ones((2, 1), np.float32)
    with stores(2, mode="sync", workers=2) as (first, second):
        (before,) = first.pull([PullSpec("table 0", keys)]).rows()
        update = TableUpdate("table 0", keys, one)
        after = first.push([update], then=[PullSpec("table 0", keys)])
        got: list[np.ndarray] = []
        thread = threading.Thread(target=lambda: got.extend(after.rows()))
        thread.start()
        second.push([update])
        second.flush()
        thread.join(20)
        np.testing.assert_array_equal(got[0], before - 0.5)


def test_what_a_server_refuses_is_raised_and_the_connection_lives(way):
    keys = np.arange(3, dtype=np.int64)
    with stores(1) as (store,):
        store.push([TableUpdate("table 0", keys, np.ones((3, 1), np.float32))], step=5)
        with pytest.raises(ConfigError, match=r"Worker 0 pushes step 5, but its step 0 did not come"):
            store.flush()
        # A push that was refused stays to be sent again, so only what needs no flush is asked.
        report = store._connections[0].call("report", {}).meta
        assert report["tables"]["table 0"]["pushed"] == 0


@pytest.mark.parametrize("way", ["tcp", "tls"], indirect=True)
def test_a_pull_over_the_limit_is_an_error_and_the_connection_lives(way):
    with stores(1, max_frame_bytes=1 << 20) as (store,):
        with pytest.raises(
            ConfigError, match=r"'pull' of worker 0 brings 8,000,000 bytes; server 0 takes 1,048,576 at"
        ):
            store.pull([PullSpec("table 0", np.arange(1_000_000))]).rows()
        assert store.pull([PullSpec("table 0", np.arange(5))]).rows()[0].shape == (5, 1)


def test_a_server_without_tables_takes_no_pull(way):
    service = Service()
    with serving(service.handle) as listener:
        store = RemoteStore([listener.endpoint], secret=SECRET, worker=0, workers=1)
        store.declare(SPECS)
        with pytest.raises(ConfigError, match="There are no tables here to pull from or push to"):
            store.pull([PullSpec("table 0", np.arange(5))]).rows()
        store.close()
