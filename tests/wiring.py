"""A listener in a thread and clients of it, for the tests of the parameter server's wire."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from phalanx.ps.wire import Connection, Handler, Listener, tls_stream
from phalanx.ps.wire.address import Address

SECRET = b"0123456789abcdef"


@contextmanager
def serving(handler: Handler, on: str = "127.0.0.1:0", me: str = "server 0", **options: Any) -> Iterator[Listener]:
    """Serve until the block ends, and make sure that no thread of it is left."""
    listener = Listener(on, secret=SECRET, me=me, handler=handler, **options)
    thread = threading.Thread(target=listener.serve)
    thread.start()
    try:
        yield listener
    finally:
        listener.stop()
        thread.join(10)
    assert not thread.is_alive()
    assert not [left for left in threading.enumerate() if left.name == f"{me} client"]


@contextmanager
def connected(listener: Listener, **options: Any) -> Iterator[Connection]:
    """Connect for a block, and make sure that no thread of it is left."""
    options = {"secret": SECRET, "me": "worker 1", "peer": "server 0", "timeout_s": 20.0} | options
    connection = Connection(listener.endpoint, **options)
    try:
        yield connection
    finally:
        connection.close()
    assert not connection.link.thread.is_alive()


def tcp_only(to: Address, deadline: float) -> socket.socket:
    """Connect as a client on another host would; takes the place of `dial._connect`."""
    return socket.create_connection((to.host, to.port), timeout=10)


def without_openssl(open_streams: Callable[..., tls_stream.OpenStream]) -> Callable[..., tls_stream.OpenStream]:
    """Encrypt in Python, as where the native core cannot load OpenSSL; takes the place of `tls.client_streams`."""

    def by_python(*arguments: Any) -> tls_stream.OpenStream:
        with patch.object(tls_stream, "is_native", lambda: False):
            return open_streams(*arguments)

    return by_python
