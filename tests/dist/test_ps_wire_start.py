"""A server that starts for long: clients wait for as long as it gets on, and hear why it cannot start."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from launching import wait_until
from phalanx.errors import DataError, PeerLostError
from phalanx.ps.wire import Listener, RpcReply, RpcRequest
from phalanx.ps.wire.client.connection import oldest_requests
from phalanx.ps.wire.progress import Startup, WorkProgress
from wiring import connected, serving, tcp_only

pytestmark = pytest.mark.dist


def answer(request: RpcRequest) -> RpcReply:
    return RpcReply({"seq": request.seq})


@pytest.fixture(autouse=True)
def frequent_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.ps.wire.server.session.WORK_REPORT_S", 0.05)
    monkeypatch.setattr("phalanx.ps.wire.server.session._SHORT_START_S", 0.0)


class Start:
    """The start of a server in a thread, which continues step by step until a test ends it."""

    def __init__(self) -> None:
        self.startup = Startup(WorkProgress("recovers"))
        self.error: Exception | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with self.startup as startup:
                startup.progress.expect(1000, "rows")
                while not self._end.wait(0.05):
                    startup.progress.add(1)
                if self.error is not None:
                    raise self.error
        except DataError:
            return

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self._end.set()
        self._thread.join()


@contextmanager
def starting(on: str = "127.0.0.1:0", **options: object) -> Iterator[tuple[Listener, Start]]:
    start = Start()
    with serving(answer, on, startup=start.startup, **options) as listener:
        start._thread.start()
        try:
            yield listener, start
        finally:
            start.end()


def state_of_request() -> str:
    return next((pending.server_state for _, pending in oldest_requests()), "")


def test_a_start_that_gets_on_uses_up_nobodys_patience(caplog, phalanx_propagates):
    caplog.set_level("INFO", "phalanx.ps.wire")
    with starting() as (listener, start), connected(listener, timeout_s=2.0) as connection:
        pending = connection.send("note", {})
        wait_until(lambda: state_of_request().startswith("recovers: "))
        time.sleep(3.0)  # longer than the client waits for a server that is silent
        assert pending.waits_since > pending.sent_at + 1.0  # a hang is counted from there
        assert pending.outcome is None
        start.end()
        assert pending.result().meta == {"seq": 1}
    assert "worker 1 waits: server 0 recovers: " in caplog.text
    assert " % of 1,000 rows after " in caplog.text
    assert "worker 1: server 0 answers again" in caplog.text


def test_a_start_that_gets_stuck_is_given_up():
    startup = Startup(WorkProgress("recovers"))
    startup.progress.expect(100, "rows")
    startup.progress.add(5)
    with (
        serving(answer, startup=startup) as listener,
        startup,
        connected(listener, timeout_s=0.5) as connection,
        pytest.raises(PeerLostError, match="it did not answer in time; it recovers: 5 % of 100 rows after"),
    ):
        connection.call("note", {})


@pytest.fixture(params=["unix", "tls"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Unix socket, or TLS as if a network lay between."""
    if request.param == "tls":
        monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
        monkeypatch.setattr("phalanx.ps.wire.address.is_private", lambda server: False)


@pytest.mark.usefixtures("way")
def test_waiting_clients_hear_why_a_server_cannot_start():
    with starting() as (listener, start), connected(listener) as connection:
        pending = connection.send("note", {})
        wait_until(state_of_request)
        start.end(DataError("log-00000001 is broken at byte 9. Take another copy."))
        with pytest.raises(
            PeerLostError, match=r"it cannot start: log-00000001 is broken at byte 9\. Take another copy"
        ):
            pending.result()


def test_a_server_that_fails_and_starts_again_is_waited_for(caplog, phalanx_propagates):
    """Each of the two starts takes longer than the client asks for a server that is away."""
    retry_s = 3.0
    with serving(answer) as first:
        endpoint = first.endpoint
        with connected(first, retry_s=retry_s) as connection:
            assert connection.call("note", {}).meta == {"seq": 1}
            first.stop()
            wait_until(lambda: all(sock.fileno() < 0 for sock in first._sockets))
            pending = connection.send("note", {})
            for error in (DataError("A disk was away."), None):
                with starting(endpoint) as (_, start):
                    wait_until(state_of_request)
                    time.sleep(retry_s + 0.5)
                    start.end(error)
                    if error is None:
                        assert pending.result().meta == {"seq": 2}
                    else:
                        wait_until(lambda: "it cannot start: A disk was away" in caplog.text)
                        pending.server_state = ""


@pytest.mark.usefixtures("way")
def test_a_client_counts_as_connected_once_it_is_answered():
    events: list[str] = []
    about = {"opened": lambda client: events.append("opened"), "closed": lambda client: events.append("closed")}
    with starting(**about) as (listener, start):
        with connected(listener) as left:
            left.send("note", {})
            wait_until(state_of_request)
        wait_until(lambda: not listener._running())
        with connected(listener) as connection:
            pending = connection.send("note", {})
            assert events == []
            start.end()
            pending.result()
            assert events == ["opened"]
        wait_until(lambda: events == ["opened", "closed"])
