"""A server that is stopped or killed: no wait outlives its deadline, and what was not answered is sent again, once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from launching import wait_until
from phalanx.errors import PeerLostError
from phalanx.ps.wire import Connection
from phalanx.ps.wire import secret as handshake
from phalanx.ps.wire.channel import Channel
from wiring import SECRET, tcp_only

pytestmark = pytest.mark.fault

SERVER = """
import json, sys, time
from phalanx.ps.wire import Listener, RpcReply

def handler(request):
    with open(sys.argv[2], "a") as record:
        sums = [int(array.sum()) for array in request.arrays]
        print(json.dumps([request.op, request.client, request.seq, sums]), file=record)
    if request.op == "hold" and sys.argv[3] == "holds":
        time.sleep(60)
    return RpcReply({"seq": request.seq}, request.arrays)

listener = Listener(sys.argv[1], secret=b"0123456789abcdef", me="server 0", handler=handler)
print(listener.endpoint, flush=True)
listener.serve()
"""


@contextmanager
def server(record: Path, endpoint: str = "127.0.0.1:0", how: str = "answers") -> Iterator[tuple[subprocess.Popen, str]]:
    command = [sys.executable, "-c", SERVER, endpoint, str(record), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def connect(endpoint: str, timeout_s: float = 20.0, retry_s: float = 0.0, connect_s: float = 20.0) -> Connection:
    return Connection(
        endpoint,
        secret=SECRET,
        me="worker 1",
        peer="server 0",
        timeout_s=timeout_s,
        retry_s=retry_s,
        connect_s=connect_s,
    )


def recorded(record: Path) -> list[list]:
    return [json.loads(line) for line in record.read_text().splitlines()]


def stop(process: subprocess.Popen) -> None:
    """Stop a process and wait until it stands still."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


@pytest.mark.parametrize("rows", [10, 100_000])
def test_a_stopped_server_is_lost_at_the_deadline(tmp_path, rows):
    with server(tmp_path / "record") as (process, endpoint):
        connection = connect(endpoint, timeout_s=0.7)
        stop(process)
        started = time.monotonic()
        with pytest.raises(
            PeerLostError,
            match=r"worker 1 asked server 0 at 127\.0\.0\.1:\d+ \(Unix socket\) for 'push' and waited \d+\.\d s: it "
            r"did not answer in time\.",
        ):
            connection.call("push", {}, [np.zeros(rows)])
        assert 0.6 < time.monotonic() - started < 5
        with pytest.raises(PeerLostError, match=r"for 'pull' and waited \d+\.\d s: it did not answer in time"):
            connection.send("pull", {})
        connection.close()


def test_a_stopped_server_that_takes_no_bytes_is_lost_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
    with server(tmp_path / "record") as (process, endpoint):
        connection = connect(endpoint, timeout_s=0.7)
        stop(process)
        started = time.monotonic()
        with pytest.raises(PeerLostError, match=r"for 'push' and waited .* s: it does not take requests"):
            connection.call("push", {}, [np.zeros(8_000_000)])
        assert time.monotonic() - started < 5
        connection.close()


def test_a_stopped_server_cannot_be_connected_to_for_ever(tmp_path):
    with server(tmp_path / "record") as (process, endpoint):
        stop(process)
        with pytest.raises(
            PeerLostError, match=r"for 'connect' and waited \d+\.\d s: it did not answer in time\. Start"
        ):
            connect(endpoint, connect_s=0.5)


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_server_that_stands_still_for_a_while_gets_again_what_it_did_not_answer(tmp_path, monkeypatch, caplog, way):
    if way == "tcp":
        monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
    with server(tmp_path / "record") as (process, endpoint):
        connection = connect(endpoint, timeout_s=0.3, retry_s=20.0)
        stop(process)
        pending = [connection.send("push", {}, [np.ones(2000, np.int64)]), connection.send("pull", {})]
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.extend(one.result().meta["seq"] for one in pending))
        waiting.start()
        wait_until(lambda: "it did not answer in time); connecting again" in caplog.text)
        process.send_signal(signal.SIGCONT)
        waiting.join(20)
        assert found == [1, 2]
        connection.close()
    # What it read of the old connection it may have done; the number says that it is the same request.
    assert {(op, seq) for op, _, seq, _ in recorded(tmp_path / "record")} == {("push", 1), ("pull", 2)}


def test_a_killed_server_is_lost_at_once_for_all_that_wait(tmp_path):
    with server(tmp_path / "record", how="holds") as (process, endpoint):
        connection = connect(endpoint)
        pending = [connection.send("hold", {}), connection.send("pull", {})]
        wait_until((tmp_path / "record").exists)
        process.kill()
        started = time.monotonic()
        for one in pending:
            with pytest.raises(PeerLostError, match=r"it closed the connection|reset by peer"):
                one.result()
        assert time.monotonic() - started < 5
        connection.close()


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_what_was_not_answered_is_sent_again_in_order_with_its_numbers(tmp_path, monkeypatch, way):
    if way == "tcp":
        monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
    first, second = tmp_path / "first", tmp_path / "second"
    rows = [np.full(size, size) for size in (3, 5000, 600_000)]
    with server(first, how="holds") as (process, endpoint):
        connection = connect(endpoint, retry_s=20.0)
        connection.call("note", {}, rows[:1])
        held = [connection.send("hold", {}, rows[:2])]
        # Over TCP the last one is in the middle of being written when the server dies.
        sending = threading.Thread(
            target=lambda: held.extend(connection.send("note", {}, [one], one.nbytes) for one in rows)
        )
        sending.start()
        wait_until(lambda: len(recorded(first)) == 2)
        process.kill()
        process.wait()
        with server(second, endpoint) as (_, _):
            sending.join(20)
            replies = [one.result() for one in held]
            late = connection.call("note", {}).meta["seq"]
            connection.close()
    sums = [int(one.sum()) for one in rows]
    assert [reply.meta["seq"] for reply in replies] == [2, 3, 4, 5]
    assert [int(reply.arrays[0].sum()) for reply in replies] == [sums[0], *sums]
    client = connection.client
    assert recorded(first) == [["note", client, 1, sums[:1]], ["hold", client, 2, sums[:2]]]
    assert recorded(second)[0] == ["hold", client, 2, sums[:2]]
    assert recorded(second)[1:-1] == [["note", client, 3 + k, [one]] for k, one in enumerate(sums)]
    assert late == 6


def test_requests_made_while_the_server_is_away_arrive_when_it_is_back(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    with server(first) as (process, endpoint):
        connection = connect(endpoint, retry_s=20.0)
        process.kill()
        process.wait()
        replies = []
        asking = threading.Thread(target=lambda: replies.append(connection.call("note", {}, [np.ones(9, np.int64)])))
        asking.start()
        with server(second, endpoint):
            asking.join(20)
            connection.close()
    assert replies[0].meta == {"seq": 1}
    assert recorded(second) == [["note", connection.client, 1, [9]]]


def test_a_server_that_does_not_come_back_is_given_up(tmp_path):
    with server(tmp_path / "record") as (process, endpoint):
        connection = connect(endpoint, retry_s=0.3)
        process.kill()
        process.wait()
        with pytest.raises(PeerLostError, match=r"and for \d+\.\d s not again: Connection refused"):
            connection.call("pull", {})
        connection.close()


def test_a_request_that_ends_every_connection_is_given_up():
    numbers: list[int] = []
    over = threading.Event()

    def read_and_leave() -> None:
        while True:
            accepted, _ = listening.accept()
            channel = Channel(accepted)
            mine, deadline = handshake.greeting("server 0"), time.monotonic() + 10
            with suppress(OSError):
                handshake.admit(channel, mine, secret=SECRET, binding=b"", deadline=deadline)
                numbers.append(channel.read_head(deadline)[0].seq)
            channel.close()
            if over.is_set():
                return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=read_and_leave)
        thread.start()
        connection = connect(f"127.0.0.1:{listening.getsockname()[1]}", retry_s=1.2)
        started = time.monotonic()
        with pytest.raises(PeerLostError, match=r"worker 1 asked server 0 .* for 'pull' and waited .* not again: "):
            connection.call("pull", {})
        assert time.monotonic() - started < 10
        over.set()
        connection.close()
        socket.create_connection(listening.getsockname(), timeout=10).close()
        thread.join(10)
    assert set(numbers) == {1}
    assert len(numbers) <= 4  # at first, and at most every half second for 1.2 s


def test_a_server_that_goes_while_nobody_waits_is_noticed_and_closing_ends_the_wait_for_it(tmp_path, caplog):
    with server(tmp_path / "record") as (process, endpoint):
        connection = connect(endpoint, retry_s=60.0)
        process.kill()
        process.wait()
        wait_until(lambda: "(it closed the connection); connecting again" in caplog.text)
        started = time.monotonic()
        connection.close()
        assert not connection.link.thread.is_alive()
        assert time.monotonic() - started < 5


def test_a_killed_client_leaves_nothing_on_the_server(tmp_path):
    script = f"""
import os, sys
import numpy as np
from phalanx.ps.wire import Connection
connection = Connection(sys.argv[1], secret={SECRET!r}, me="worker 1", peer="server 0")
connection.call("note", {{}}, [np.zeros(100_000)])
os.kill(os.getpid(), 9)
"""
    with server(tmp_path / "record") as (process, endpoint):
        threads, files = Path(f"/proc/{process.pid}/task"), Path(f"/proc/{process.pid}/fd")
        connection = connect(endpoint)
        connection.call("note", {})
        before = len(os.listdir(files)), len(os.listdir(threads))
        for _ in range(2):
            subprocess.run([sys.executable, "-c", script, endpoint], check=False)
        assert len(recorded(tmp_path / "record")) == 3
        wait_until(lambda: (len(os.listdir(files)), len(os.listdir(threads))) == before)
        connection.close()
