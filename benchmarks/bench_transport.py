"""One worker and one server: the wire of the parameter server against a raw socket and `multiprocessing.connection`.

tiny   a request without arrays and its reply
pull   13,000 keys to the server, their rows of 16 float32 back
push   200 MB to the server, an acknowledgement back

Ours numbers, checks, orders and can repeat every request; the peers move the same bytes and do nothing else.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Client
from multiprocessing.connection import Listener as PeerListener
from typing import Any

import numpy as np

from benchmarks.report import Row, arguments, measure_pairs, show
from phalanx.ps.wire import Connection, Listener, RpcReply, RpcRequest

CASES = ("tiny", "pull", "push")
SECRET = b"a secret of this benchmark"
KEYS, DIM = 13_000, 16
PUSH_BYTES = 200_000_000
ASK = 16


def serve_ours(told: Any) -> None:
    """Answer with our listener."""
    rows = np.ones((KEYS, DIM), np.float32)

    def answer(request: RpcRequest) -> RpcReply:
        if request.op != "pull":
            return RpcReply()
        made = request.reply_buffer.empty(rows.shape, np.float32)
        made[...] = rows
        return RpcReply({}, [made])

    listener = Listener("127.0.0.1:0", secret=SECRET, me="server 0", handler=answer)
    told.send(listener.endpoint)
    listener.serve()


def serve_socket(told: Any) -> None:
    """Answer over a Unix socket: 16 bytes say what is asked and how many bytes follow."""
    rows, memory = np.ones(KEYS * DIM, np.float32), np.empty(PUSH_BYTES, np.uint8)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("")
        listening.listen()
        told.send(listening.getsockname())
        client, _ = listening.accept()
        with client:
            while fill(client, memory[:ASK]):
                asked, size = memory[:ASK].view(np.int64).tolist()
                fill(client, memory[:size])
                client.sendall(rows if asked == CASES.index("pull") else memory[:ASK])


def serve_connection(told: Any) -> None:
    """Answer over `multiprocessing.connection`."""
    rows, memory = np.ones(KEYS * DIM, np.float32), np.empty(PUSH_BYTES, np.uint8)
    with PeerListener(family="AF_UNIX", authkey=SECRET) as listening:
        told.send(listening.address)
        with listening.accept() as client:
            while asked := client.recv_bytes():
                size = client.recv_bytes_into(memory.data) if asked != b"tiny" else 0
                client.send_bytes(rows.data.cast("B") if asked == b"pull" else memory[: min(size, ASK)].data)


def fill(connected: socket.socket, memory: Any) -> int:
    """Read exactly as much as `memory` holds; 0 at the end."""
    view = memoryview(memory).cast("B") if len(memory) else memoryview(b"")
    at = 0
    while at < len(view):
        count = connected.recv_into(view[at:])
        if not count:
            return 0
        at += count
    return at


@contextmanager
def server(serve: Callable[[Any], None]) -> Iterator[Any]:
    """Start a server process for a block; gives its address."""
    near, far = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(far,))
    process.start()
    try:
        yield near.recv()
    finally:
        process.terminate()
        process.join()


def ask_ours(connection: Connection, case: str, payload: Any) -> None:
    """Ask once through our connection."""
    arrays = [] if case == "tiny" else [payload]
    connection.call(case, {}, arrays, KEYS * DIM * 4 if case == "pull" else 0)


def ask_socket(connected: socket.socket, case: str, payload: Any, memory: Any) -> None:
    """Ask once through a socket."""
    size = 0 if case == "tiny" else payload.nbytes
    connected.sendall(np.array([CASES.index(case), size]))
    connected.sendall(payload[:size])
    fill(connected, memory if case == "pull" else memory[:ASK])


def ask_connection(connected: Any, case: str, payload: Any, memory: Any) -> None:
    """Ask once through `multiprocessing.connection`."""
    connected.send_bytes(case.encode())
    if case != "tiny":
        connected.send_bytes(payload.data)
    connected.recv_bytes_into(memory.data)


def measure(case: str, *, quick: bool) -> list[Row]:
    """Measure one case against both peers."""
    count = {"tiny": 8, "pull": KEYS * 8, "push": PUSH_BYTES // 100 if quick else PUSH_BYTES}[case]
    payload, memory = np.ones(count, np.uint8), np.empty(KEYS * DIM * 4, np.uint8)
    times = 3 if quick or case == "push" else 300
    unit, better = ("GB/s", "higher") if case == "push" else ("us", "lower")

    def reading(ask: Callable[[], None]) -> Callable[[], float]:
        def read() -> float:
            found = []
            for _ in range(times):
                started = time.perf_counter()
                ask()
                found.append(time.perf_counter() - started)
            median = statistics.median(found)
            return count / median / 1e9 if case == "push" else median * 1e6

        return read

    with ExitStack() as stack:
        at = [stack.enter_context(server(serve)) for serve in (serve_ours, serve_socket, serve_connection)]
        ours = Connection(at[0], secret=SECRET, me="worker 0", peer="server 0")
        stack.callback(ours.close)
        raw = stack.enter_context(socket.socket(socket.AF_UNIX))
        raw.connect(at[1])
        connection = stack.enter_context(Client(at[2], authkey=SECRET))
        peers = {
            "raw Unix socket": lambda: ask_socket(raw, case, payload, memory),
            "multiprocessing.connection": lambda: ask_connection(connection, case, payload, memory),
        }
        return [
            measure_pairs(
                f"{case} {name}",
                reading(lambda: ask_ours(ours, case, payload)),
                reading(peer),
                pairs=1 if quick else 9,
                unit=unit,
                better=better,
                peer_name=name,
            )
            for name, peer in peers.items()
        ]


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(CASES)
    show(
        "bench_transport", [row for case in asked.cases for row in measure(case, quick=asked.quick)], as_json=asked.json
    )


if __name__ == "__main__":
    main()
