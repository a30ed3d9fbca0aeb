"""Clients and a listener over real sockets: what arrives, in which order, and what a mistake says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from launching import wait_until
from phalanx.errors import BackendError, ClosedError, ConfigError, InternalError, PeerLostError, PlanError
from phalanx.ps.wire import Connection, Handler, Listener, RpcReply, RpcRequest
from phalanx.ps.wire.segments import SegmentLease
from wiring import SECRET, connected, serving, tcp_only

pytestmark = pytest.mark.dist


def answer(request: RpcRequest) -> RpcReply:
    match request.op:
        case "echo":
            return RpcReply(request.meta, request.arrays)
        case "who":
            return RpcReply({"client": request.client, "seq": request.seq, "peer": request.peer})
        case "rows":
            made = request.reply_buffer.empty((request.meta["n"], 16), np.float32)
            made[...] = np.arange(request.meta["n"], dtype=np.float32)[:, None]
            return RpcReply({}, [made])
        case "sum":
            return RpcReply({"sums": [int(array.sum()) for array in request.arrays]})
        case "plan":
            raise PlanError("that plan does not fit. Choose another.")
        case _:
            raise KeyError(request.op)


@contextmanager
def both(handler: Handler = answer, **options) -> Iterator[Connection]:
    with serving(handler) as listener, connected(listener, **options) as connection:
        yield connection


@pytest.fixture(params=["unix", "tcp"])
def way(request, monkeypatch) -> str:
    """Both ways to a server of this host; TCP by hiding the Unix socket from the client."""
    if request.param == "tcp":
        monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
    return request.param


ARRAYS = [
    np.arange(-5, 5, dtype=np.int64),
    np.zeros((0, 16), np.float32),
    np.full((3, 5, 2), 1.5),
    np.array(7, np.uint32),
    np.frombuffer(b"text", np.uint8),
]


def test_arrays_and_json_come_back_as_they_were_sent(way):
    with both() as connection:
        reply = connection.call("echo", {"a": [1, None, {"b": "é"}]}, ARRAYS)
    assert reply.meta == {"a": [1, None, {"b": "é"}]}
    for got, sent in zip(reply.arrays, ARRAYS, strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert np.array_equal(got, sent)


@pytest.mark.parametrize("n", [1, 8 << 10, 1 << 20])
@pytest.mark.parametrize("reply_bytes", [0, 1 << 23])
def test_any_size_comes_back_whole(way, n, reply_bytes):
    rows = np.random.default_rng(n).integers(0, 1 << 60, n)
    with both() as connection:
        assert np.array_equal(connection.call("echo", {}, [rows, rows[::-1]], reply_bytes).arrays[1], rows[::-1])


def test_a_push_of_200_megabytes_has_no_cliff(way):
    rows = np.ones(25_000_000, np.int64)
    with both() as connection:
        assert connection.call("sum", {}, [rows, rows[:10]]).meta["sums"] == [25_000_000, 10]


def test_a_reply_made_in_the_room_lies_in_the_clients_own_memory():
    with both() as connection:
        (rows,) = connection.call("rows", {"n": 1000}, reply_bytes=1000 * 64).arrays
        assert rows[:, 3].tolist() == list(range(1000))
        owner = rows
        while isinstance(owner, np.ndarray):
            owner = owner.base
        assert isinstance(owner, SegmentLease)


def test_a_kept_reply_is_not_overwritten_by_later_ones():
    with both() as connection:
        kept = [connection.call("echo", {}, [np.full(2000, k)], 16000).arrays[0] for k in range(20)]
    assert [int(array[0]) for array in kept] == list(range(20))
    assert all((array == array[0]).all() for array in kept)


def test_without_shared_memory_arrays_go_through_the_socket(monkeypatch, caplog, phalanx_propagates):
    def none_left(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("phalanx.ps.wire.segments.os.memfd_create", none_left)
    with both() as connection:
        assert connection.call("sum", {}, [np.ones(5000, np.int64)]).meta["sums"] == [5000]
    assert "no shared memory of 65536 bytes (Too many open files): arrays go through the socket" in caplog.text


def test_requests_are_numbered_and_answered_in_order(way):
    with both(client=2**64 - 1) as connection:
        pending = [connection.send("who", {}) for _ in range(100)]
        metas = [one.result().meta for one in pending]
    assert [meta["seq"] for meta in metas] == list(range(1, 101))
    assert {(meta["client"], meta["peer"]) for meta in metas} == {(2**64 - 1, "worker 1")}


def test_several_threads_share_a_connection(way):
    wrong = []

    def ask(number: int) -> None:
        for step in range(50):
            sent = np.full(3000, number * 1000 + step)
            wrong.extend([] if np.array_equal(connection.call("echo", {}, [sent], 24000).arrays[0], sent) else [step])

    with both() as connection:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_an_error_of_the_handler_is_raised_as_its_class_and_the_connection_lives():
    with both() as connection:
        with pytest.raises(PlanError, match=r"that plan does not fit\. Choose another\."):
            connection.call("plan", {})
        with pytest.raises(InternalError, match=r"server 0 failed at 'nonsense' with KeyError"):
            connection.call("nonsense", {})
        assert connection.call("echo", {"still": True}).meta == {"still": True}


def test_an_array_of_another_type_is_refused_before_it_is_sent():
    with both() as connection:
        with pytest.raises(
            ConfigError, match=r"array of complex128 cannot be sent\. Convert it to one of int64, float"
        ):
            connection.call("echo", {}, [np.zeros(2, complex)])
        assert connection.call("echo", {}).meta == {}


def test_a_closed_connection_says_so():
    with both() as connection:
        connection.close()
        with pytest.raises(ClosedError, match=r"connection to server 0 is closed; 'echo' was not sent"):
            connection.send("echo", {})


def test_a_server_that_ends_is_an_error_at_once_naming_all():
    both_sent = threading.Event()

    def block(request: RpcRequest) -> RpcReply:
        both_sent.wait(10)
        listener.stop()
        raise OSError("gone")

    with serving(block) as listener, connected(listener) as connection:
        first, second = connection.send("pull", {}), connection.send("push", {})
        both_sent.set()
        with pytest.raises(InternalError, match="server 0 failed at 'pull'"):
            first.result()
        with pytest.raises(
            PeerLostError,
            match=r"worker 1 asked server 0 at 127\.0\.0\.1:\d+ \(Unix socket\) for 'push' and waited \d\.\d s: ",
        ):
            second.result()


def test_an_answer_that_waits_for_others_is_not_late_while_they_live(caplog, monkeypatch):
    monkeypatch.setattr("phalanx.ps.wire.client.connection._LOG_EVERY_S", 0.0)
    caplog.set_level("INFO", "phalanx.ps.wire")

    def slow(request: RpcRequest) -> RpcReply:
        for _ in range(8):
            threading.Event().wait(0.1)  # longer in all than the client waits for one that is silent
            request.report_wait("worker 1 (at step 3)", request.op == "here")
        return RpcReply()

    with both(slow, timeout_s=0.5) as connection:
        first, second = connection.send("here", {}), connection.send("here", {})
        first.result()
        second.result()
        assert "worker 1 waits for server 0, which waits for worker 1 (at step 3)" in caplog.text
        with pytest.raises(PeerLostError, match=r"it did not answer in time; it waits for worker 1 \(at step 3\)"):
            connection.call("gone", {})


def test_a_client_that_goes_while_its_answer_waits_is_noticed():
    gone, entered = threading.Event(), threading.Event()

    def slow(request: RpcRequest) -> RpcReply:
        entered.set()
        with pytest.raises(ClosedError, match="worker 1 went while server 0 waited for worker 1"):
            wait_for_ever(request)
        gone.set()
        return RpcReply()

    def wait_for_ever(request: RpcRequest) -> None:
        while True:
            request.report_wait("worker 1", True)
            threading.Event().wait(0.01)

    with both(slow) as connection:
        connection.send("pull", {})
        entered.wait(10)
        connection.close()
        assert gone.wait(10)


def test_send_waits_while_too_much_is_unanswered():
    go, sent = threading.Event(), threading.Event()

    def slow(request: RpcRequest) -> RpcReply:
        go.wait(10)
        return RpcReply()

    def push_another() -> None:
        connection.send("push", {}, [np.zeros(4000)]).result()
        sent.set()

    with both(slow, max_unanswered_bytes=50_000) as connection:
        connection.send("push", {}, [np.zeros(4000)])
        thread = threading.Thread(target=push_another)
        thread.start()
        assert not sent.wait(0.1)
        go.set()
        assert sent.wait(10)
        thread.join()


def test_a_caller_may_change_its_arrays_once_send_returned(way):
    go = threading.Event()

    def slow(request: RpcRequest) -> RpcReply:
        go.wait(10)
        return answer(request)

    with both(slow, retry_s=5.0) as connection:
        rows = np.ones(200_000, np.int64)
        first, second = connection.send("who", {}), connection.send("sum", {}, [rows])
        rows[...] = 7
        go.set()
        first.result()
        assert second.result().meta["sums"] == [200_000]


def test_a_request_in_shared_memory_survives_a_second_loss_on_a_link_without_any(monkeypatch):
    sums = []

    def handler(request):
        sums.append(int(request.arrays[0].sum()))
        monkeypatch.setattr("phalanx.ps.wire.segments.SegmentPool.lease", lambda pool, size: None)
        if len(sums) < 3:
            for session in listener._running().values():
                session.channel.interrupt()
        return RpcReply()

    with serving(handler) as listener, connected(listener, retry_s=20.0) as connection:
        connection.call("push", {}, [np.ones(10_000, np.int64)])
    assert sums == [10_000] * 3


@pytest.mark.parametrize("retry_s", [0.0, 0.3])
def test_an_answer_that_memory_cannot_hold_is_an_error_and_no_wait(monkeypatch, retry_s):
    def refuse(*_):
        raise MemoryError

    with serving(answer) as listener, connected(listener, retry_s=retry_s) as connection:
        monkeypatch.setattr("phalanx.ps.wire.message.Pending.read_outcome", refuse)
        with pytest.raises(PeerLostError, match="MemoryError"):
            connection.call("rows", {"n": 10})


def test_a_frame_over_the_limit_is_an_error_and_the_connection_lives(monkeypatch):
    monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
    with serving(answer, max_frame_bytes=1 << 20) as listener, connected(listener) as connection:
        with pytest.raises(ConfigError, match=r"'sum' of worker 1 brings 8,000,000 bytes; server 0 takes 1,048,576 at"):
            connection.call("sum", {}, [np.zeros(1_000_000)])
        assert connection.call("sum", {}, [np.ones(1000, np.int64)]).meta["sums"] == [1000]


def test_requests_of_all_clients_share_one_budget(monkeypatch):
    monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
    inside, go = threading.Event(), threading.Event()

    def hold(request: RpcRequest) -> RpcReply:
        inside.set()
        go.wait(10)
        return answer(request)

    with (
        serving(hold, max_total_bytes=10 << 20) as listener,
        connected(listener) as one,
        connected(listener, me="worker 2") as two,
    ):
        first = one.send("sum", {}, [np.ones(1_000_000, np.int64)])
        inside.wait(10)
        with pytest.raises(BackendError, match=r"'sum' of worker 2 brings 8,000,000 bytes; server 0 holds all it may"):
            two.call("sum", {}, [np.ones(1_000_000, np.int64)])
        go.set()
        assert first.result().meta["sums"] == [1_000_000]
        assert two.call("sum", {}, [np.ones(1_000_000, np.int64)]).meta["sums"] == [1_000_000]


def test_two_servers_of_one_port_on_two_addresses_are_told_apart():
    with serving(answer) as listener:
        port = listener.endpoint.rpartition(":")[2]
        with serving(answer, on=f"127.0.0.2:{port}", me="server 1") as other:
            with connected(other, peer="server 1") as connection:
                assert connection.call("echo", {"at": 1}).meta == {"at": 1}
            with connected(listener) as connection:
                assert connection.call("echo", {"at": 0}).meta == {"at": 0}


def test_a_taken_endpoint_is_named():
    with (
        serving(answer) as listener,
        pytest.raises(ConfigError, match=r"cannot listen at 127\.0\.0\.1:\d+: Address already"),
    ):
        Listener(listener.endpoint, secret=SECRET, me="server 1", handler=answer)


def test_one_that_waits_reads_its_answer_itself_and_leaves_the_thread_alone(monkeypatch):
    monkeypatch.setattr("phalanx.ps.wire.client.link._IDLE_S", 60.0)
    readers = set()
    with both() as connection:
        channel = connection.link.channel
        has_bytes = channel.has_bytes

        def noted(deadline: float | None = None) -> bool:
            readers.add(threading.current_thread())
            return has_bytes(deadline)

        monkeypatch.setattr(channel, "has_bytes", noted)
        for _ in range(10):
            connection.call("echo", {}, ARRAYS)
        assert readers == {threading.current_thread()}


def test_answers_are_taken_while_requests_wait_for_room_in_the_socket(way, monkeypatch):
    monkeypatch.setattr("phalanx.ps.wire.client.link._IDLE_S", 60.0)
    monkeypatch.setattr("phalanx.ps.wire.segments.SegmentPool.lease", lambda pool, size: None)
    rows = np.arange(1_000_000)
    with both(max_unanswered_bytes=1 << 30) as connection:
        pending = [connection.send("echo", {}, [rows]) for _ in range(6)]
        assert all(np.array_equal(one.result().arrays[0], rows) for one in pending)


def test_answers_that_nobody_waits_for_are_taken_one_behind_the_other(monkeypatch):
    monkeypatch.setattr("phalanx.ps.wire.client.link._IDLE_S", 1.0)
    with both() as connection:
        pending = [connection.send("echo", {"at": at}) for at in range(60)]
        # A pause before each would make a minute of it.
        wait_until(lambda: all(request.outcome is not None for request in pending), 30.0)


def test_one_whose_answer_another_has_read_waits_for_no_more(monkeypatch):
    monkeypatch.setattr("phalanx.ps.wire.client.link._IDLE_S", 60.0)
    with both(timeout_s=30.0) as connection:
        read = connection.link.read

        def late(deadline: float | None, awaited=None) -> None:
            read(deadline)  # of another thread, between the look of the one that waits and its turn
            read(deadline, awaited)

        monkeypatch.setattr(connection.link, "read", late)
        started = time.monotonic()
        assert connection.call("echo", {"at": 1}).meta == {"at": 1}
        assert time.monotonic() - started < 15.0


def test_a_wait_that_the_user_interrupts_can_be_taken_up_again(monkeypatch):
    monkeypatch.setattr("phalanx.ps.wire.client.link._IDLE_S", 60.0)
    with both() as connection:
        channel = connection.link.channel

        def interrupted(deadline: float | None) -> bool:
            raise KeyboardInterrupt

        pending = connection.send("echo", {"at": 1})
        with monkeypatch.context() as patch:
            patch.setattr(channel, "has_bytes", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pending.result()
        assert pending.result().meta == {"at": 1}
        assert connection.call("echo", {"at": 2}).meta == {"at": 2}
