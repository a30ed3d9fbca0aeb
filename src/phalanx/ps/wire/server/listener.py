"""`Listener`: RPC server over Unix socket and TCP, one thread per client."""

from __future__ import annotations

import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from phalanx.errors import ConfigError
from phalanx.ps.wire import address
from phalanx.ps.wire.channel import Channel, UnixChannel, prepare_tcp
from phalanx.ps.wire.message import Handler
from phalanx.ps.wire.progress import Startup
from phalanx.ps.wire.server.session import ServerConfig, Session
from phalanx.ps.wire.tls import ServerCertificate
from phalanx.versions import HAS_NATIVE

if HAS_NATIVE:
    from phalanx import _core
    from phalanx._core import DataHandler

_log = logging.getLogger("phalanx.ps.wire")
_MOST_HANDSHAKES = 64
_MOST_REFUSALS = 1000
_PAUSE_S = 0.1
_LEAVE_S = 5.0
_CREDENTIALS = struct.Struct("3i")


class Listener:
    """Answers requests of clients that hold the job's secret; listens from its making on.

    Args:
        listen_on: `host:port` (port 0: the system chooses), or sockets as `address.listening_sockets` makes them.
        secret: The job's secret.
        me: Who this server is, as `server 0`.
        handler: Answers one request, in the thread of its client; may block. See `RpcRequest` for how long arrays live.
        data_handler: Answers pulls and pushes, without the GIL if it is native; none are taken when None.
        max_frame_bytes: Largest payload of one request through a socket; a larger one is an error in the client.
        max_total_bytes: Most bytes that requests of all clients may hold here at once. Shared memory is the
            clients' own and not counted.
        handshake_s: How long a client may take to prove that it holds the secret.
        opened: Called with a client's number when a connection of it is admitted, in the thread of that connection.
        closed: Called with it when that connection ended.
        startup: What happens before requests are answered: clients are told how far it is, or why it failed.

    Raises:
        ConfigError: If an address that other hosts reach has no secret, or is taken; or without the native core.
    """

    def __init__(
        self,
        listen_on: str | Sequence[socket.socket],
        *,
        secret: bytes,
        me: str,
        handler: Handler,
        data_handler: DataHandler | None = None,
        max_frame_bytes: int = 1 << 30,
        max_total_bytes: int = 4 << 30,
        handshake_s: float = 10.0,
        opened: Callable[[int], None] = lambda client: None,
        closed: Callable[[int], None] = lambda client: None,
        startup: Startup | None = None,
    ) -> None:
        if not HAS_NATIVE:
            raise ConfigError(
                f"{me} needs the native core of phalanx, which is not installed here. Install a wheel of this "
                "platform, or build one with a C++20 compiler; workers run without it."
            )
        if isinstance(listen_on, str):
            listen_on = address.listening_sockets(listen_on, secret)
        self._sockets = list(listen_on)
        for listening in self._sockets:
            address.require_secret(listening, secret)
            listening.setblocking(False)
        public = any(_is_public(listening) for listening in self._sockets)
        self._certificate = ServerCertificate() if public else None
        self._stopping = threading.Event()
        budget = _core.MemoryBudget(max_total_bytes)
        self._context = _core.ServerContext(data_handler, me, max_frame_bytes, budget, _log.error)
        self._config = ServerConfig(
            key=secret,
            me=me,
            handler=handler,
            max_frame_bytes=max_frame_bytes,
            budget=budget,
            handshake_s=handshake_s,
            context=self._context,
            startup=startup or Startup.immediate(),
            stopping=self._stopping,
            opened=opened,
            closed=closed,
        )
        self._wake, self._woken = socket.socketpair()
        self._sessions: dict[threading.Thread, Session] = {}
        self._refused: set[str] = set()
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        """Return `host:port` of the TCP socket, with the port that the system chose."""
        tcp = next(sock for sock in self._sockets if sock.family != socket.AF_UNIX)
        return address.where(tcp.getsockname())

    def serve(self) -> None:
        """Answer until `stop`; then let running requests end for some seconds, and close everything."""
        try:
            with selectors.DefaultSelector() as selector:
                for listening in [*self._sockets, self._woken]:
                    selector.register(listening, selectors.EVENT_READ)
                while not self._stopping.is_set():
                    for key, _ in selector.select():
                        if isinstance(key.fileobj, socket.socket) and key.fileobj is not self._woken:
                            self._accept(key.fileobj)
        finally:
            self._end()

    def stop(self) -> None:
        """Make `serve` return; any thread may call it, a handler's too."""
        self._stopping.set()
        self._context.stop()
        try:
            self._wake.send(b"x")
        except OSError:
            # `serve` has ended already and closed its sockets.
            return

    def _accept(self, listening: socket.socket) -> None:
        try:
            connected, name = listening.accept()
        except BlockingIOError:
            return  # it left again before we came
        except OSError as error:
            _log.error("%s cannot accept a client: %s", self._config.me, error.strerror)
            self._stopping.wait(_PAUSE_S)  # out of descriptors: the client waits in the backlog until some are free
            return
        try:
            channel, where = self._channel(connected), _client_name(connected, name)
        except OSError:
            connected.close()
            return
        except (RuntimeError, MemoryError) as error:  # of OpenSSL; the other clients are served on
            _log.error("%s cannot serve a client: %s", self._config.me, error)
            connected.close()
            return
        handshakes = sum(not session.admitted for session in self._running().values())
        if handshakes >= _MOST_HANDSHAKES:
            self._log_refusal(where, f"{handshakes} others are in their handshake; it was turned away")
            channel.close()
            return
        self._start(Session(channel, where, self._config))

    def _channel(self, connected: socket.socket) -> Channel:
        if connected.family == socket.AF_UNIX:
            return UnixChannel(connected)
        prepare_tcp(connected)
        if self._certificate is None or address.is_private(connected.getsockname()):
            return Channel(connected)
        return self._certificate.channel(connected)

    def _start(self, session: Session) -> None:
        thread = threading.Thread(
            target=session.run, args=(self._log_refusal,), name=f"{self._config.me} client", daemon=True
        )
        with self._lock:  # until it is alive: who asks what runs drops threads that are not
            thread.start()
            self._sessions[thread] = session

    def _log_refusal(self, where: str, why: str) -> None:
        """Log what is wrong with a client, once for each."""
        with self._lock:
            is_logged = where in self._refused or len(self._refused) >= _MOST_REFUSALS
            self._refused.add(where)
        if not is_logged:
            _log.warning("%s refuses a client from %s: %s", self._config.me, where, why)

    def _end(self) -> None:
        for sock in [*self._sockets, self._wake, self._woken]:
            sock.close()
        for session in self._running().values():
            session.leave()
        self._join(_LEAVE_S)
        running = self._running()
        for session in running.values():
            session.channel.interrupt()
        self._join(_PAUSE_S)
        if running:
            _log.error("%s ends while %s requests are still being answered", self._config.me, len(running))

    def _running(self) -> dict[threading.Thread, Session]:
        with self._lock:
            self._sessions = {thread: session for thread, session in self._sessions.items() if thread.is_alive()}
            return dict(self._sessions)

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._running():
            thread.join(max(0.0, deadline - time.monotonic()))


def _is_public(listening: socket.socket) -> bool:
    return listening.family != socket.AF_UNIX and not address.is_private(listening.getsockname())


def _client_name(connected: socket.socket, name: object) -> str:
    """Return who connected: a process of this host, or a host."""
    if connected.family == socket.AF_UNIX:
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return f"process {_CREDENTIALS.unpack(raw)[0]} of this host"
    return address.where(name).rpartition(":")[0]
