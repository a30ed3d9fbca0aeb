"""A worker's pulls and pushes on several servers at once, when one of them is not as the others."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np
import pytest

from launching import wait_until
from phalanx.errors import BackendError, ClosedError, InternalError, PeerLostError
from phalanx.ps.server.service import Service
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.fan_out import FanOut
from phalanx.ps.stores.partition import partition_keys, partitioned_request
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.placement import table_salt
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.update_rules import SGD
from phalanx.ps.wire import Listener, frame
from phalanx.ps.wire.data_frame import DataStatus
from phalanx.ps.wire.frame import FrameKind
from phalanx.ps.wire.progress import Startup, WorkProgress
from wiring import SECRET, serving

pytestmark = pytest.mark.dist

SERVERS = 4
SPEC = TableSpec(name="items", dim=8, rule=SGD(lr=1.0), init=Constant(0.0))
SIZES = pytest.mark.parametrize("size", [40, 4000])  # through the sockets, and in shared memory


def serve(service: Service, rank: int, **options) -> AbstractContextManager[Listener]:
    """Serve a service of this process behind a socket."""
    return serving(
        service.handle,
        me=f"server {rank}",
        data_handler=service.engine,
        opened=service.connected,
        closed=service.disconnected,
        **options,
    )


@contextmanager
def cluster(mode: str = "async", workers: int = 1, **options) -> Iterator[tuple[list[Service], list[RemoteStore]]]:
    """Give services of this process, each behind a socket, and workers of them."""
    services = [Service(rank, SERVERS) for rank in range(SERVERS)]
    with ExitStack() as stack:
        listeners = [stack.enter_context(serve(service, rank)) for rank, service in enumerate(services)]
        for service in services:
            stack.callback(service.stop)
        stores = []
        for worker in range(workers):
            endpoints = [listener.endpoint for listener in listeners]
            store = RemoteStore(endpoints, secret=SECRET, worker=worker, workers=workers, mode=mode, **options)
            stack.callback(store.close)
            store.declare([SPEC])
            stores.append(store)
        yield services, stores


def pull(store: RemoteStore, size: int, step: int = 0) -> list[float]:
    (rows,) = store.pull([PullSpec("items", np.arange(size))], step=step).rows()
    assert rows.shape == (size, 8)
    return sorted(set(rows.ravel().tolist()))


def push(store: RemoteStore, size: int, step: int = 0) -> None:
    store.push([TableUpdate("items", np.arange(size), np.ones((size, 8), np.float32))], step=step)


@SIZES
def test_steps_are_counted_on_every_server(size):
    with cluster() as (services, (store,)):
        for step in range(5):
            assert pull(store, size, step) == [-float(step)]
            push(store, size, step)
        store.flush()
        assert [service.state.require_clocks().steps for service in services] == [[5]] * SERVERS


@SIZES
def test_a_push_and_the_pull_behind_it_are_answered_in_their_order(size):
    with cluster() as (_, (store,)):
        push(store, size)
        assert pull(store, size, 1) == [-1.0]


@SIZES
def test_rows_that_were_asked_early_are_read_behind_a_push(size):
    with cluster() as (_, (store,)):
        early = store.pull([PullSpec("items", np.arange(size))])
        push(store, size)
        store.flush()
        assert early.rows()[0].max() == 0.0
        assert pull(store, size, 1) == [-1.0]


@SIZES
def test_a_server_that_answers_late_holds_up_no_other_request(size):
    with cluster() as (services, (store,)):
        services[3].write_freeze.freeze("late", 60.0)
        push(store, size)
        waiting = threading.Thread(target=store.flush)
        waiting.start()
        # Its own thread reads the replies of all; who asks the other servers meanwhile is answered.
        wait_until(lambda: all(connection.oldest_request() is None for connection in store._connections[:3]))
        for connection in store._connections[:3]:
            assert connection.call("report", {}).meta["steps"] == [1]
        assert waiting.is_alive()
        services[3].write_freeze.resume("late")
        waiting.join(20)
        assert pull(store, size, 1) == [-1.0]


@SIZES
def test_servers_that_wait_say_so_and_are_not_late(monkeypatch, size):
    monkeypatch.setattr("phalanx.ps.server.clocks.WAIT_REPORT_S", 0.05)
    with cluster("sync", workers=2, timeout_s=0.5) as (_, (first, second)):
        push(first, size)
        waiting: list[list[float]] = []
        thread = threading.Thread(target=lambda: waiting.append(pull(first, size, 1)))
        thread.start()
        asked = [connection.oldest_request for connection in first._connections]
        wait_until(lambda: all((of := oldest()) and "worker 1" in of[1].server_state for oldest in asked))
        push(second, size)
        second.flush()
        thread.join(20)
        assert waiting == [[-1.0]]


@SIZES
def test_a_server_that_forgot_the_pull_gets_the_keys(size):
    with cluster() as (services, (store,)):
        keys = np.arange(size)
        store.pull([PullSpec("items", keys)]).rows()
        services[2].engine.forget_pulls()
        store.push([TableUpdate("items", keys, np.ones((size, 8), np.float32))])
        assert pull(store, size, 1) == [-1.0]
        assert [service.state.require_clocks().steps for service in services] == [[1]] * SERVERS


@SIZES
def test_what_one_server_refuses_is_sent_again_to_that_one_alone(size):
    with cluster() as (services, (store,)):
        services[1].engine.set_budget(1)
        push(store, size)
        with pytest.raises(BackendError, match="Start more servers"):
            store.flush()
        services[1].engine.set_budget(1 << 40)
        assert pull(store, size, 1) == [-1.0]
        assert [service.state.require_clocks().steps for service in services] == [[1]] * SERVERS


def divert(store: RemoteStore, rank: int) -> socket.socket:
    """Put this process at the other end of a store's socket to a server; the server sees it closed."""
    ours, theirs = socket.socketpair()
    os.dup2(theirs.fileno(), store._connections[rank].link.channel.fileno(), inheritable=False)
    theirs.close()
    ours.settimeout(20)
    return ours


@SIZES
@pytest.mark.parametrize("sent_bytes", [0, 20, 60])
def test_a_server_that_dies_in_the_middle_of_a_frame_gets_the_push_again(size, sent_bytes):
    with cluster(retry_s=20.0) as (services, (store,)):
        assert pull(store, size) == [0.0]
        with divert(store, 2) as peer:
            push(store, size)
            header = frame.decode_header(peer.recv(frame.HEADER_BYTES))
            reply = frame.encode_raw(FrameKind.ROWS, 0, header.client, header.seq, bytes(32), 0)
            peer.sendall(reply[:sent_bytes])
        assert pull(store, size, 1) == [-1.0]
        assert [service.state.require_clocks().steps for service in services] == [[1]] * SERVERS


@SIZES
def test_an_answer_that_no_pull_can_have_is_an_error_that_names_the_server(size):
    with cluster() as (_, (store,)):
        assert pull(store, size) == [0.0]
        with divert(store, 2) as peer:
            waiting = store.pull([PullSpec("items", np.arange(size))])
            header = frame.decode_header(peer.recv(frame.HEADER_BYTES))
            status = bytes([DataStatus.NEED_KEYS]).ljust(32, b"\0")
            peer.sendall(frame.encode_raw(FrameKind.ROWS, 0, header.client, header.seq, status, 0))
            with pytest.raises(InternalError, match="Server 2 answered a pull with NEED_KEYS, not with rows"):
                waiting.rows()


def test_without_retries_a_server_that_dies_is_an_error_that_names_it():
    with cluster() as (_, (store,)):
        with divert(store, 2):
            push(store, 40)
        with pytest.raises(PeerLostError, match=r"worker 0 asked server 2 at .* for 'push'"):
            store.flush()


def test_what_cannot_be_sent_to_one_server_is_sent_once_to_the_others():
    with cluster() as (services, (store,)):
        store._connections[2].close()
        push(store, 40)
        for _ in range(2):
            with pytest.raises(ClosedError, match="the connection to server 2 is closed"):
                store.flush()
        store._connections[3].call("report", {})
        assert [service.state.require_clocks().steps for service in services] == [[1], [1], [0], [1]]


@SIZES
def test_a_server_that_starts_again_for_long_is_waited_for(monkeypatch, size):
    monkeypatch.setattr("phalanx.ps.wire.server.session.WORK_REPORT_S", 0.05)
    monkeypatch.setattr("phalanx.ps.wire.server.session._SHORT_START_S", 0.0)
    patience_s = 1.0
    services = [Service(rank, 2) for rank in range(2)]
    startup = Startup(WorkProgress("recovers"))
    startup.progress.expect(100_000, "rows")
    rows: list[list[float]] = []
    with ExitStack() as stack:
        calm = stack.enter_context(serve(services[0], 0))
        with serve(services[1], 1) as killed:
            endpoints = [calm.endpoint, killed.endpoint]
            store = RemoteStore(endpoints, secret=SECRET, worker=0, workers=1, timeout_s=patience_s, retry_s=patience_s)
            stack.callback(store.close)
            store.declare([SPEC])
            assert pull(store, size) == [0.0]
        stack.enter_context(serve(services[1], 1, on=endpoints[1], startup=startup))
        push(store, size)
        waiting = threading.Thread(target=lambda: rows.append(pull(store, size, 1)))
        waiting.start()
        until = time.monotonic() + 3 * patience_s

        def has_waited_long() -> bool:
            startup.progress.add(1)
            _, oldest = store._connections[1].oldest_request()
            return time.monotonic() > until and oldest.server_state.startswith("recovers: ")

        wait_until(has_waited_long)
        assert waiting.is_alive()
        with startup:
            pass
        waiting.join(20)
        assert rows == [[-1.0]]
        assert [service.state.require_clocks().steps for service in services] == [[1], [1]]
        store.close()
        for service in services:
            service.stop()


@SIZES
def test_whoever_breaks_off_the_wait_may_take_it_up_again(size):
    class StopError(Exception):
        pass

    def stop(number, stack):
        raise StopError

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with cluster() as (services, (store,)):
            services[3].write_freeze.freeze("late", 60.0)
            push(store, size)
            settled = [connection.oldest_request for connection in store._connections[:3]]

            def interrupt() -> None:
                wait_until(lambda: all(oldest() is None for oldest in settled))
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(StopError):
                store.flush()
            thread.join(20)
            services[3].write_freeze.resume("late")
            store.flush()
            assert pull(store, size, 1) == [-1.0]
            assert [service.state.require_clocks().steps for service in services] == [[1]] * SERVERS
    finally:
        signal.signal(signal.SIGUSR1, before)


@SIZES
def test_a_step_in_which_all_goes_well_needs_no_object_for_each_server(size, monkeypatch):
    with cluster() as (_, (store,)):
        assert pull(store, size) == [0.0]
        monkeypatch.setattr("phalanx.ps.wire.message.Pending.__init__", lambda *_: pytest.fail("a request was made"))
        push(store, size)
        assert pull(store, size, 1) == [-1.0]


@SIZES
def test_requests_under_way_stay_in_order_when_links_are_given_back_and_borrowed_again(size):
    with cluster() as (services, (store,)):
        for step in range(3):
            early = store.pull([PullSpec("items", np.arange(size))], step=step)
            assert store._connections[1].call("report", {}).meta["steps"] == [step]
            push(store, size, step)
            assert early.rows()[0].max() == -float(step)
            store.flush()
        assert [service.state.require_clocks().steps for service in services] == [[3]] * SERVERS


def test_rows_that_are_kept_are_not_overwritten_by_later_ones():
    service = Service(0, 1)
    with serve(service, 0) as listener:
        store = RemoteStore([listener.endpoint], secret=SECRET, worker=0, workers=1)
        store.declare([SPEC])
        kept = []
        for step in range(12):  # more than there are segments of a size
            kept += store.pull([PullSpec("items", np.arange(4000))], step=step).rows()
            push(store, 4000, step)
        store.flush()
        assert [set(rows.ravel().tolist()) for rows in kept] == [{-float(step)} for step in range(12)]
        del kept
        for step in range(12, 30):
            assert pull(store, 4000, step) == [-float(step)]
            push(store, 4000, step)
        store.close()
        service.stop()


def test_a_server_that_goes_while_nobody_waits_is_noticed():
    with cluster(retry_s=20.0) as (services, (store,)):
        assert pull(store, 40) == [0.0]
        lost = store._connections[2].link
        with divert(store, 2):
            push(store, 40)
        wait_until(lambda: store._connections[2].link is not lost)
        assert pull(store, 40, 1) == [-1.0]
        assert [service.state.require_clocks().steps for service in services] == [[1]] * SERVERS


def test_a_socket_that_takes_part_of_a_push_gets_the_rest(monkeypatch):
    with cluster() as (services, (store,)):
        assert pull(store, 800) == [0.0]
        buffer = socket.SO_SNDBUF
        for connection in store._connections:
            connection.link.channel._socket.setsockopt(socket.SOL_SOCKET, buffer, 1)
        for service in services[:2]:
            service.write_freeze.freeze("late", 60.0)
        sent = [store.pull([PullSpec("items", np.arange(900))], step=0) for _ in range(8)]
        for service in services[:2]:
            service.write_freeze.resume("late")
        assert all(rows.rows()[0].shape == (900, 8) for rows in sent)
        push(store, 800)
        assert pull(store, 800, 1) == [-1.0]


@SIZES
def test_a_client_without_the_native_core_takes_the_same_steps(size, monkeypatch):
    for module in ("fan_out", "partition"):
        monkeypatch.setattr(f"phalanx.ps.stores.{module}.HAS_NATIVE", False)
    with cluster() as (services, (store,)):
        for step in range(3):
            assert pull(store, size, step) == [-float(step)]
            push(store, size, step)
        assert pull(store, size, 3) == [-3.0]
        assert [service.state.require_clocks().steps for service in services] == [[3]] * SERVERS


@SIZES
def test_threads_that_pull_push_and_ask_at_once_get_their_own_answers(size):
    with cluster() as (services, (store,)):
        is_over = threading.Event()
        failures: list[BaseException] = []

        def repeat(act) -> None:
            try:
                while not is_over.is_set():
                    act()
            except BaseException as error:
                failures.append(error)
                raise

        def read() -> None:
            keys = np.arange(size)
            request = partitioned_request(SERVERS)
            request.add_pull(partition_keys(keys, table_salt("items"), SERVERS), SPEC.dim)
            sent = FanOut(store._connections, request, request.read_servers(), FrameKind.PULL, 0)
            sent.send()
            sent.wait()
            (rows,) = request.merge({rank: sent.reply(rank).rows for rank in sent.servers})
            steps = np.unique(rows)  # of which each server may be at another
            assert len(steps) <= SERVERS
            assert not (steps % 1).any()

        asks = [read, read, lambda: [connection.call("report", {}) for connection in store._connections]]
        threads = [threading.Thread(target=repeat, args=(ask,)) for ask in asks]
        for thread in threads:
            thread.start()
        for step in range(60):
            push(store, size, step)
            store.flush()
        is_over.set()
        for thread in threads:
            thread.join(20)
        assert not failures
        assert pull(store, size, 60) == [-60.0]
        assert [service.state.require_clocks().steps for service in services] == [[60]] * SERVERS


@SIZES
def test_signals_at_any_moment_lose_no_push_and_count_none_twice(size):
    class StopError(Exception):
        pass

    is_armed = False

    def stop(number, stack):
        if is_armed:
            raise StopError

    def interrupt() -> None:
        while not is_over.wait(0.002):
            signal.pthread_kill(main_thread, signal.SIGUSR1)

    def is_finished(act) -> bool:
        nonlocal is_armed
        try:
            is_armed = True
            act()
            is_armed = False
        except StopError:
            is_armed = False
            return False
        return True

    is_over, main_thread = threading.Event(), threading.main_thread().ident
    before = signal.signal(signal.SIGUSR1, stop)
    storm = threading.Thread(target=interrupt)
    storm.start()
    stops = steps = 0
    rows: list[list[float]] = []
    try:
        with cluster(retry_s=20.0) as (services, (store,)):
            while stops < 100:
                while not is_finished(lambda step=steps: rows.append(pull(store, size, step))):
                    stops += 1
                assert rows.pop() == [-float(steps)]
                rows.clear()
                push(store, size, steps)
                steps += 1
                while not is_finished(store.flush):
                    stops += 1
            assert pull(store, size, steps) == [-float(steps)]
            assert [service.state.require_clocks().steps for service in services] == [[steps]] * SERVERS
    finally:
        is_over.set()
        storm.join()
        signal.signal(signal.SIGUSR1, before)
