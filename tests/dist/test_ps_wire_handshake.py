"""Who may talk to a server, and what each side says of the others."""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from phalanx.errors import ConfigError, PeerLostError
from phalanx.ps.wire import Connection, Listener, RpcReply, RpcRequest, tls, tls_stream
from phalanx.ps.wire import secret as handshake
from wiring import SECRET, connected, serving, tcp_only, without_openssl

pytestmark = pytest.mark.dist


def answer(request: RpcRequest) -> RpcReply:
    return RpcReply(request.meta, request.arrays)


@pytest.fixture
def over_tls(monkeypatch) -> None:
    """Treat this host's own addresses as if a network lay between."""
    monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
    monkeypatch.setattr("phalanx.ps.wire.address.is_private", lambda server: False)


def connect(endpoint: str, secret: bytes = SECRET, peer: str = "server 0", connect_s: float = 10.0) -> Connection:
    return Connection(endpoint, secret=secret, me="worker 1", peer=peer, connect_s=connect_s)


def test_another_secret_is_refused_on_both_sides_and_logged_once(caplog, phalanx_propagates):
    with serving(answer) as listener:
        for _ in range(3):
            with pytest.raises(
                ConfigError,
                match=rf"worker 1 cannot use server 0 at {listener.endpoint}: the secrets differ\. Start servers and",
            ):
                connect(listener.endpoint, secret=b"another secret of a job")
        with connected(listener) as connection:
            assert connection.call("echo", {"a": 1}).meta == {"a": 1}
    (record,) = caplog.records
    assert "server 0 refuses a client from process" in record.message
    assert "the secrets differ" in record.message


def test_another_version_is_refused_naming_both(monkeypatch, caplog, phalanx_propagates):
    old = handshake.greeting("worker 1", 5)
    raw = bytearray(old.raw)
    raw[4:6] = (9).to_bytes(2, "little")
    raw[6:32] = b"0.0.9".ljust(26, b"\0")
    stale = handshake.Greeting(bytes(raw), 9, "0.0.9", 5, "worker 1")
    with serving(answer) as listener:
        now = handshake.greeting

        def greet(name: str, client: int = 0) -> handshake.Greeting:
            return stale if client else now(name)

        monkeypatch.setattr("phalanx.ps.wire.client.dial.secret.greeting", greet)
        with pytest.raises(
            ConfigError,
            match=r"it runs phalanx \d\S+ with wire version 4, this process phalanx 0\.0\.9 with wire version 9\. In",
        ):
            connect(listener.endpoint)
    assert "it runs phalanx 0.0.9 with wire version 9, this process" in caplog.text


def test_a_server_of_another_number_is_not_used():
    with (
        serving(answer, me="server 1") as listener,
        pytest.raises(ConfigError, match=r"cannot use server 0 at .*: it is server 1\. Give all processes the same"),
    ):
        connect(listener.endpoint)


def test_an_endpoint_must_be_host_and_port():
    with pytest.raises(ConfigError, match=r"the endpoint 'localhost' is not host:port"):
        connect("localhost")


def refused(endpoint: str) -> str:
    with pytest.raises(ConfigError, match="worker 1 cannot use server 0 at") as caught:
        connect(endpoint)
    return str(caught.value)


@contextmanager
def saying(words: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something else that listens and does `words` with its first client."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            client, _ = listening.accept()
            with client:
                words(client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


def test_something_else_at_the_port_is_named():
    with saying(lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as endpoint:
        error = refused(endpoint)
    assert re.search(r"does not speak this protocol \(it sent b'HTTP'\)\. Check the port\.$", error)


def test_something_silent_at_the_port_is_given_up():
    done = threading.Event()
    with saying(lambda client: done.wait(10)) as endpoint:
        with pytest.raises(PeerLostError, match=r"server 0 at .* for 'connect' and waited .* Start it, or correct"):
            connect(endpoint, connect_s=0.3)
        done.set()


def test_nobody_at_the_port_is_waited_for_and_then_named(unused_port):
    with pytest.raises(PeerLostError, match=r"worker 1 asked server 0 at .* .* Connection refused\. Start it"):
        connect(f"127.0.0.1:{unused_port}", connect_s=0.2)


def test_a_client_may_start_before_its_server(unused_port):
    made: list[Connection] = []
    thread = threading.Thread(target=lambda: made.append(connect(f"127.0.0.1:{unused_port}")))
    thread.start()
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(("127.0.0.1", unused_port))
        from phalanx.ps.wire.address import listening_sockets

        sockets = listening_sockets(f"127.0.0.1:{unused_port}", SECRET, bound)
        listener = Listener(sockets, secret=SECRET, me="server 0", handler=answer)
        serve = threading.Thread(target=listener.serve)
        serve.start()
        thread.join(10)
        assert made[0].call("echo", {"late": True}).meta == {"late": True}
        made[0].close()
        listener.stop()
        serve.join(10)


def test_a_client_that_says_nothing_is_sent_away():
    with serving(answer, handshake_s=0.05) as listener, tcp_only_to(listener) as silent:
        assert silent.recv(1) == b""


def test_only_so_many_strangers_are_let_in(monkeypatch, caplog, phalanx_propagates):
    monkeypatch.setattr("phalanx.ps.wire.server.listener._MOST_HANDSHAKES", 3)
    with serving(answer) as listener:
        strangers = [tcp_only_to(listener) for _ in range(4)]
        assert strangers[3].recv(1) == b""
        for stranger in strangers:
            stranger.close()
    assert "3 others are in their handshake; it was turned away" in caplog.text


def test_an_open_address_needs_a_secret():
    with pytest.raises(ConfigError, match=r"listening at 0\.0\.0\.0:\d+ needs a secret of at least 16 bytes, found 3"):
        Listener("0.0.0.0:0", secret=b"abc", me="server 0", handler=answer)


def test_off_the_host_all_is_encrypted(over_tls):
    with serving(answer, on="0.0.0.0:0") as listener, connected(Where(listener)) as connection:
        assert isinstance(connection.link.channel, tls.TlsChannel)
        rows = np.arange(3_000_000)
        pending = [connection.send("echo", {"k": k}, [rows + k]) for k in range(3)]
        for k, one in enumerate(pending):
            assert np.array_equal(one.result().arrays[0], rows + k)


def test_whoever_sits_between_two_ends_is_found_out(over_tls):
    """It holds no secret, so it can only pass on the proofs, which name another certificate than its own."""
    with serving(answer, on="0.0.0.0:0") as listener:

        def relay(client: socket.socket) -> None:
            near, _ = without_openssl(tls_stream.server_streams)(*tls._make_certificate())(client)
            near.settimeout(10)
            near.do_handshake()
            far = ssl._create_unverified_context().wrap_socket(tcp_only_to(listener))
            with near, far:
                far.sendall(near.recv(4096))
                near.sendall(far.recv(4096))
                far.sendall(near.recv(4096))
                near.sendall(far.recv(4096))

        with saying(relay) as endpoint, pytest.raises(ConfigError, match="the secrets differ"):
            connect(endpoint)


def test_a_plain_client_cannot_talk_to_a_server_that_encrypts(over_tls, caplog, phalanx_propagates):
    with serving(answer, on="0.0.0.0:0") as listener, tcp_only_to(listener) as plain:
        plain.sendall(handshake.greeting("worker 1").raw)
        with suppress(ConnectionResetError):
            while plain.recv(4096):
                continue
    assert "it does not speak TLS 1.3" in caplog.text


def test_a_server_without_tls_is_named(over_tls):
    with saying(lambda client: client.sendall(b"220 mail at your service\r\n")) as endpoint:
        error = refused(endpoint)
    assert re.search(r"it does not speak TLS 1\.3 \(wrong version number\)\. Check address and port\.$", error)


def test_the_deadline_of_the_handshake_holds_under_tls(over_tls):
    done = threading.Event()
    started = time.monotonic()
    with saying(lambda client: done.wait(10)) as endpoint:
        with pytest.raises(PeerLostError, match="did not answer in time"):
            connect(endpoint, connect_s=0.2)
        done.set()
    assert time.monotonic() - started < 5


class Where:
    """The endpoint of a listener that is open to all, as a client on this host reaches it."""

    def __init__(self, listener: Listener) -> None:
        self.endpoint = listener.endpoint.replace("0.0.0.0", "127.0.0.1")


def tcp_only_to(listener: Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(listener.endpoint.rpartition(":")[2])), timeout=10)
