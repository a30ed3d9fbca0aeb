"""Rows and gradients that travel as bfloat16: what is rounded, by how much, and what is not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from phalanx._core import MemoryBudget, ServerContext
from phalanx.ps.server.log import replay
from phalanx.ps.server.recovery import Recovery
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.stores.base import PullSpec, Rows
from phalanx.ps.stores.partition import ServerPart, partition_keys, partitioned_request
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.initializers import nearest_bfloat16
from phalanx.ps.table.placement import table_salt
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.update_rules import SGD
from phalanx.ps.wire import frame
from phalanx.ps.wire.data_frame import DataRequest
from phalanx.ps.wire.frame import FrameKind
from wiring import SECRET, serving, tcp_only

pytestmark = pytest.mark.dist

DIM = 8
SPEC = TableSpec(name="items", dim=DIM, rule=SGD(lr=1.0), init=Constant(0.0))
DENSE = TableSpec(name="dense", dim=DIM, rule=SGD(lr=1.0), init=Constant(0.0), dense=40)
SIZES = pytest.mark.parametrize("size", [40, 4000])  # through the sockets, and in shared memory


@pytest.fixture(params=["unix", "tls"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Unix socket, or TLS as if a network lay between."""
    if request.param == "tls":
        monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
        monkeypatch.setattr("phalanx.ps.wire.address.is_private", lambda server: False)


@contextmanager
def cluster(
    *wire_dtypes: str, servers: int = 3, mode: str = "async", services: list[Service] | None = None, **options
) -> Iterator[tuple[list[Service], list[RemoteStore]]]:
    """Give services of this process, each behind a socket, and a worker of them for each type."""
    services = services or [Service(rank, servers) for rank in range(servers)]
    with ExitStack() as stack:
        endpoints = [
            stack.enter_context(
                serving(
                    service.handle,
                    me=f"server {rank}",
                    data_handler=service.engine,
                    opened=service.connected,
                    closed=service.disconnected,
                )
            ).endpoint
            for rank, service in enumerate(services)
        ]
        for service in services:
            stack.callback(service.stop)
        stores = []
        for worker, wire_dtype in enumerate(wire_dtypes):
            about = {"secret": SECRET, "worker": worker, "workers": len(wire_dtypes), "mode": mode}
            store = RemoteStore(endpoints, wire_dtype=wire_dtype, **about, **options)
            stack.callback(store.close)
            store.declare([SPEC, DENSE])
            stores.append(store)
        yield services, stores


def gradients(size: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).standard_normal((size, DIM)).astype(np.float32)


def pull(store: RemoteStore, size: int, step: int = 0, table: str = "items") -> Rows:
    (rows,) = store.pull([PullSpec(table, np.arange(size))], step=step).rows()
    return rows


def push(store: RemoteStore, values: Rows, step: int = 0, table: str = "items", kind: str = "gradient") -> None:
    store.push([TableUpdate(table, np.arange(len(values)), values, kind=kind)], step=step)


@SIZES
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("servers", [1, 3])
def test_gradients_and_rows_are_rounded_to_the_nearest_and_servers_keep_float32(size, servers):
    with cluster("bfloat16", "float32", servers=servers) as (_, (narrow, wide)):
        sent, exact = gradients(size), gradients(size, 1)
        push(narrow, sent)
        narrow.flush()
        push(wide, exact)
        wide.flush()
        kept = -nearest_bfloat16(sent) - exact
        np.testing.assert_array_equal(pull(wide, size, 1), kept)
        np.testing.assert_array_equal(pull(narrow, size, 1), nearest_bfloat16(kept))


@SIZES
def test_rows_that_come_with_a_push_are_rounded_too(size):
    with cluster("bfloat16") as (_, (store,)):
        keys, values = np.arange(size), gradients(size)
        after = store.push([TableUpdate("items", keys, values)], then=[PullSpec("items", keys)])
        np.testing.assert_array_equal(after.rows()[0], -nearest_bfloat16(values))


@SIZES
def test_two_workers_read_the_same_bits(size):
    with cluster("bfloat16", "bfloat16", mode="sync") as (_, stores):
        for step in range(3):
            for worker, store in enumerate(stores):
                push(store, gradients(size, 2 * step + worker), step)
            first, second = (pull(store, size, step + 1) for store in stores)
            assert first.tobytes() == second.tobytes()


def test_an_error_of_many_steps_is_that_of_its_gradients():
    steps, size = 20, 40
    with cluster("bfloat16", "float32") as (_, (narrow, wide)):
        expected, most = np.zeros((size, DIM), np.float32), np.zeros((size, DIM), np.float32)
        for step in range(steps):
            values = gradients(size, step)
            push(narrow, values, step)
            expected -= values
            most += np.abs(values) / 256
        narrow.flush()
        error = np.abs(pull(wide, size) - expected)
        assert (error <= most + 1e-5).all()
        assert error.max() > 1e-3


@pytest.mark.parametrize("kind", ["assign", "delta"])
def test_first_values_and_differences_are_not_rounded(kind):
    with cluster("bfloat16", "float32") as (_, (narrow, wide)):
        push(narrow, gradients(40), kind=kind)
        narrow.flush()
        np.testing.assert_array_equal(pull(wide, 40), gradients(40))


def test_dense_parameters_are_not_rounded():
    with cluster("bfloat16") as (_, (store,)):
        push(store, gradients(40), table="dense")
        np.testing.assert_array_equal(pull(store, 40, 1, "dense"), -gradients(40))


def test_half_the_bytes_of_values_travel():
    keys = np.arange(1000, dtype=np.int64)
    payloads, rows = [], []
    for is_narrow in (False, True):
        request = partitioned_request(1)
        partition = partition_keys(keys, 1, 1)
        request.add_push(TableUpdate("items", keys, gradients(1000)), partition, None, is_narrow=is_narrow)
        request.add_pull(partition, DIM, is_narrow=is_narrow)
        payloads.append(request.payload_bytes(0, True) - 2 * keys.nbytes)
        rows.append(request.rows_bytes(0))
    assert payloads == rows == [4 * 1000 * DIM, 2 * 1000 * DIM]


def divert(store: RemoteStore, rank: int) -> socket.socket:
    """Put this process at the other end of a store's socket to a server; the server sees it closed."""
    ours, theirs = socket.socketpair()
    os.dup2(theirs.fileno(), store._connections[rank].link.channel.fileno(), inheritable=False)
    theirs.close()
    ours.settimeout(20)
    return ours


@SIZES
def test_a_push_that_is_sent_again_has_the_same_bits(size):
    with cluster("bfloat16", retry_s=20.0) as (services, (store,)):
        assert not pull(store, size).any()
        with divert(store, 2) as peer:
            push(store, gradients(size))
            peer.recv(frame.HEADER_BYTES)
        np.testing.assert_array_equal(pull(store, size, 1), -nearest_bfloat16(gradients(size)))
        assert [service.state.require_clocks().steps for service in services] == [[1]] * 3


def recovered(directory: Path) -> Service:
    service = Service()
    Recovery(service, SnapshotService(service), directory).recover("test")
    return service


def test_the_log_is_float32_and_gives_the_same_bits_again(tmp_path):
    with cluster("bfloat16", services=[recovered(tmp_path)]) as (_, (store,)):
        push(store, gradients(40))
        before = pull(store, 40, 1)
    (record,) = (record for record in replay(tmp_path, 0) if record.meta["op"] == "push")
    assert record.arrays[1].dtype == np.float32
    np.testing.assert_array_equal(record.arrays[1], nearest_bfloat16(gradients(40)))
    with cluster("float32", services=[recovered(tmp_path)]) as (_, (store,)):
        np.testing.assert_array_equal(pull(store, 40), before)


def test_a_push_whose_values_find_no_memory_is_refused():
    with cluster("bfloat16", servers=1) as ((service,), _):
        request = partitioned_request(1)
        keys = np.arange(40)
        partition = partition_keys(keys, table_salt("items"), 1)
        request.add_push(TableUpdate("items", keys, gradients(40)), partition, None, is_narrow=True)
        part = ServerPart(request, 0)
        payload = np.empty(part.payload_bytes, np.uint8)
        part.write(payload)
        context = ServerContext(service.engine, "server 0", 1 << 30, MemoryBudget(1000), print)
        raw = DataRequest(FrameKind.PUSH, part, 0).encode(None)
        kind, answer, _ = context.answer("worker 0", 1, FrameKind.PUSH, 9, raw, payload, lambda who, here: None)
        assert kind == FrameKind.ERROR
        assert "'push' of worker 0 needs 1,280 bytes for its bfloat16; server 0 holds all it may" in answer.decode()
