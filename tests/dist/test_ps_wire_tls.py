"""TLS by the native core and by Python: every pair of ends, and every way in which a connection breaks."""

from __future__ import annotations

import ctypes
import itertools
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from phalanx.errors import ConfigError, PeerLostError
from phalanx.ps.server.service import Service
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.update_rules import SGD
from phalanx.ps.wire import Connection, RpcReply, RpcRequest, tls, tls_stream
from phalanx.ps.wire.channel import Channel
from phalanx.ps.wire.client.link import ServerLink
from wiring import SECRET, connected, serving, tcp_only, without_openssl

pytestmark = pytest.mark.dist

BY = ["native", "python"]
PAIRS = list(itertools.product(BY, BY))
SPEC = TableSpec("items", 8, SGD(lr=1.0), init=Constant(0.0))


@pytest.fixture(params=PAIRS, ids=[f"{client} client of {server} server" for client, server in PAIRS])
def over_tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Treat this host's addresses as if a network lay between; gives who encrypts at the client and at the server."""
    monkeypatch.setattr("phalanx.ps.wire.client.dial._connect", tcp_only)
    monkeypatch.setattr("phalanx.ps.wire.address.is_private", lambda server: False)
    for name, end in zip(("client_streams", "server_streams"), request.param, strict=True):
        if end == "python":
            monkeypatch.setattr(tls, name, without_openssl(getattr(tls_stream, name)))
    return request.param


NATIVE = pytest.mark.parametrize("over_tls", [("native", "native")], indirect=True)
NATIVE_CLIENT = pytest.mark.parametrize("over_tls", [("native", "python")], indirect=True)


def answer(request: RpcRequest) -> RpcReply:
    return RpcReply(request.meta, request.arrays)


def channel_of(connection: Connection) -> Channel:
    return connection.link.channel


def test_each_end_encrypts_as_it_can(over_tls):
    client, _ = over_tls
    with serving(answer) as listener, connected(listener) as connection:
        stream = channel_of(connection)._tls
        assert isinstance(stream, tls_stream.PythonTlsStream) == (client == "python")
        rows = np.random.default_rng(0).integers(0, 256, 9_000_000, np.uint8)  # three chunks, hundreds of records
        for size in (0, 1, 16_000, 16_384, 70_001, len(rows)):
            (back,) = connection.call("echo", {"size": size}, [rows[:size]]).arrays
            assert np.array_equal(back, rows[:size])


def test_requests_of_several_threads_and_their_answers_share_a_connection(over_tls):
    wrong: list[int] = []
    with serving(answer) as listener, connected(listener) as connection:

        def ask(thread: int) -> None:
            rows = np.full(300_000 + thread, thread, np.uint8)
            pending = [connection.send("echo", {"k": k}, [rows]) for k in range(8)]
            for k, one in enumerate(pending):
                reply = one.result()
                if reply.meta != {"k": k} or not np.array_equal(reply.arrays[0], rows):
                    wrong.append(thread)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not wrong


def test_pulls_and_pushes_have_the_rows_of_plain_sockets(over_tls):
    service = Service()
    with serving(service.handle, data_handler=service.engine) as listener:
        store = RemoteStore([listener.endpoint], secret=SECRET, worker=0, workers=1)
        store.declare([SPEC])
        keys = np.arange(40_000)
        values = np.random.default_rng(0).standard_normal((len(keys), 8)).astype(np.float32)
        store.push([TableUpdate("items", keys, values)])
        (rows,) = store.pull([PullSpec("items", keys)], step=1).rows()
        np.testing.assert_array_equal(rows, -values)
        store.close()
        service.stop()


@NATIVE
def test_the_native_core_answers_pulls_over_tls_without_python(over_tls, monkeypatch):
    service = Service()
    monkeypatch.setattr("phalanx.ps.wire.server.session.Session._answer_data", None)
    with serving(service.handle, data_handler=service.engine) as listener:
        store = RemoteStore([listener.endpoint], secret=SECRET, worker=0, workers=1)
        store.declare([SPEC])
        assert store.pull([PullSpec("items", np.arange(3))]).rows()[0].shape == (3, 8)
        store.close()
        service.stop()


def test_another_secret_is_refused(over_tls):
    with serving(answer) as listener, pytest.raises(ConfigError, match="the secrets differ"):
        Connection(listener.endpoint, secret=b"another secret of a job", me="worker 1", peer="server 0", connect_s=5)


@NATIVE_CLIENT
def test_a_server_of_the_secret_with_another_certificate_than_it_proves_is_refused(over_tls, monkeypatch):
    """As somebody between two ends who could make the server prove what it does not show."""
    monkeypatch.setattr(tls.ServerCertificate, "channel", channel_with_a_wrong_hash)
    with serving(answer) as listener, pytest.raises(ConfigError, match="the secrets differ"):
        Connection(listener.endpoint, secret=SECRET, me="worker 1", peer="server 0", connect_s=5)


def channel_with_a_wrong_hash(certificate: tls.ServerCertificate, client: socket.socket) -> tls.TlsChannel:
    return tls.TlsChannel(client, certificate._open_stream, bytes(32))


def test_a_plain_client_of_a_server_that_encrypts_reads_no_answer(over_tls, caplog, phalanx_propagates):
    with serving(answer) as listener, socket_to(listener.endpoint) as plain:
        plain.sendall(b"PHLX" + bytes(200))
        received = b""
        with suppress(ConnectionResetError):
            while part := plain.recv(4096):
                received += part
    assert "it does not speak TLS 1.3 (wrong version number)" in caplog.text
    assert len(received) <= 7  # an alert


def test_a_client_of_older_tls_is_refused(over_tls, caplog, phalanx_propagates):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        serving(answer) as listener,
        socket_to(listener.endpoint) as plain,
        pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
    ):
        context.wrap_socket(plain)
    assert "it does not speak TLS 1.3 (unsupported protocol)" in caplog.text


def test_a_server_of_older_tls_is_refused(over_tls):
    """As somebody between two ends who wants them to agree on something weaker."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as client, suppress(ssl.SSLError):
                context.wrap_socket(client, server_side=True)

        thread = threading.Thread(target=serve)
        thread.start()
        endpoint = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"it does not speak TLS 1\.3 \(tlsv1 alert protocol version\)"):
            Connection(endpoint, secret=SECRET, me="worker 1", peer="server 0", connect_s=5)
        thread.join(10)


Forward = Callable[[bytes], bytes]


class Relay:
    """A network between a client and a server, which passes on what `forward` makes of the server's bytes."""

    def __init__(self, endpoint: str, forward: Forward) -> None:
        self._to, self._forward = endpoint, forward
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listening.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError):  # until it listens no more
            while True:
                self._pass_on(self._listening.accept()[0])

    def _pass_on(self, near: socket.socket) -> None:
        with near, socket_to(self._to) as far, suppress(ConnectionError):
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    if not (part := ready.recv(1 << 16)):
                        return
                    if ready is near:
                        far.sendall(part)
                    elif kept := self._forward(part):
                        near.sendall(kept)
                    else:
                        return


@pytest.mark.parametrize("after", [20_000, 50_000, 200_000])
def test_a_connection_that_ends_within_a_record_is_a_lost_server(over_tls, after):

    with serving(answer) as listener, Relay(listener.endpoint, cut_once(after)) as relay:
        connection = Connection(relay.endpoint, secret=SECRET, me="worker 1", peer="server 0", timeout_s=10)
        with pytest.raises(PeerLostError, match=r"clos|EOF|reset|eof"):
            connection.call("echo", {}, [np.ones(1_000_000, np.uint8)])
        connection.close()


def cut_once(after: int) -> Forward:
    """End the connection after so many bytes; the next one is whole."""
    left, is_cut = after, False

    def forward(part: bytes) -> bytes:
        nonlocal left, is_cut
        if is_cut:
            return part
        kept = part[:left]
        left, is_cut = left - len(kept), not kept
        return kept

    return forward


def test_a_request_whose_answer_breaks_off_within_a_record_is_sent_again(over_tls):
    rows = np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8)
    with serving(answer) as listener, Relay(listener.endpoint, cut_once(200_000)) as relay:
        about = {"secret": SECRET, "me": "worker 1", "peer": "server 0"}
        connection = Connection(relay.endpoint, **about, timeout_s=10, retry_s=10)
        (back,) = connection.call("echo", {}, [rows]).arrays
        assert np.array_equal(back, rows)
        connection.close()


@pytest.mark.parametrize("at", [10_000, 90_000])
def test_a_changed_byte_is_noticed(over_tls, at):
    passed = 0

    def forward(part: bytes) -> bytes:
        nonlocal passed
        start, passed = passed, passed + len(part)
        if start <= at < passed:
            changed = bytearray(part)
            changed[at - start] ^= 1
            return bytes(changed)
        return part

    with serving(answer) as listener, Relay(listener.endpoint, forward) as relay:
        connection = Connection(relay.endpoint, secret=SECRET, me="worker 1", peer="server 0", timeout_s=10)
        with pytest.raises(PeerLostError, match=r"(?i)bad record mac|decryption failed|wrong version|closed"):
            connection.call("echo", {}, [np.ones(1_000_000, np.uint8)])
        connection.close()


def test_a_request_that_is_broken_off_half_written_is_never_read_together_with_the_next(over_tls, monkeypatch):
    """Ctrl-C while the socket is full: without checksums the next request would pass as the rest of it."""
    goes_on, seen = threading.Event(), []

    def take(request: RpcRequest) -> RpcReply:
        if request.op == "wait":
            goes_on.wait(10)
        seen.append((request.meta["value"], {int(value) for array in request.arrays for value in np.unique(array)}))
        return RpcReply()

    def interrupt(link: ServerLink) -> None:
        raise KeyboardInterrupt

    with serving(take) as listener, connected(listener, retry_s=10) as connection:
        connection.send("wait", {"value": 0})
        with monkeypatch.context() as patched:
            patched.setattr(ServerLink, "read_on", interrupt)
            with pytest.raises(KeyboardInterrupt):
                connection.send("take", {"value": 1}, [np.full(30_000_000, 1, np.uint8)])
        goes_on.set()
        connection.call("take", {"value": 2}, [np.full(30_000_000, 2, np.uint8)])
    assert {value for value, _ in seen} == {0, 1, 2}
    assert all(values in (set(), {value}) for value, values in seen)


@NATIVE
def test_the_log_says_once_why_the_native_core_does_not_encrypt(over_tls, monkeypatch, caplog, phalanx_propagates):
    class NoLibrary:
        @staticmethod
        def client() -> None:
            raise RuntimeError("libssl.so.3: cannot open shared object file")

    monkeypatch.setattr(tls_stream._core, "TlsContext", NoLibrary)
    tls_stream.is_native.cache_clear()
    try:
        with serving(answer) as listener, connected(listener) as connection, connected(listener) as other:
            assert connection.call("echo", {"a": 1}).meta == other.call("echo", {"a": 1}).meta
            assert isinstance(channel_of(connection)._tls, tls_stream.PythonTlsStream)
    finally:
        tls_stream.is_native.cache_clear()
    (said,) = [record.getMessage() for record in caplog.records if "encrypted by Python" in record.getMessage()]
    assert "libssl.so.3: cannot open shared object file" in said


def socket_to(endpoint: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), timeout=10)


@pytest.mark.skipif(not tls_stream.is_native(), reason="the native core cannot load OpenSSL 3")
def test_a_client_that_asks_for_new_keys_and_reads_no_answer_is_given_up() -> None:
    openssl = ctypes.CDLL("libssl.so.3")
    for make in (openssl.TLS_client_method, openssl.SSL_CTX_new, openssl.SSL_new):
        make.restype = ctypes.c_void_p
    near, far = socket.socketpair()
    with near, far:
        far.setblocking(False)
        context = openssl.SSL_CTX_new(ctypes.c_void_p(openssl.TLS_client_method()))
        client = ctypes.c_void_p(openssl.SSL_new(ctypes.c_void_p(context)))
        openssl.SSL_set_fd(client, far.fileno())
        openssl.SSL_set_connect_state(client)
        _, server = tls_stream.server_streams(*tls._make_certificate())(near)
        while openssl.SSL_do_handshake(client) != 1 or server.shake_hands():
            server.shake_hands()
        memory = memoryview(bytearray(1 << 16))
        with pytest.raises(OSError, match="asks for new keys and reads no answer"):
            for _ in range(100_000):
                openssl.SSL_key_update(client, 1)  # which asks the other end for new keys too
                openssl.SSL_do_handshake(client)
                with suppress(BlockingIOError):
                    server.receive(memory)
        openssl.SSL_free(client)
        openssl.SSL_CTX_free(ctypes.c_void_p(context))
