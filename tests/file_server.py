"""A server of files on this machine, for tests of downloads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONTENT = bytes(range(256)) * 4096
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class Server(ThreadingHTTPServer):
    """Serves `files` and notes the requests; what is odd about a path is said by its name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"data.bin": CONTENT}
        self.etags: dict[str, str] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.ends_after: int | None = None
        self.redirects: dict[str, str] = {}
        self.stalls: threading.Event | None = None
        """Waited for after the part that `ends_after` leaves was sent."""

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.split("?")[0].strip("/")
        wanted = self.headers.get("Range")
        self.server.asked.append((name, wanted))
        if name in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[name])
            self.end_headers()
            return
        if name not in self.server.files:
            self.send_error(503 if name == "busy" else 404)
            return
        content = self.server.files[name]
        first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if first >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        if name in self.server.etags:
            self.send_header("ETag", self.server.etags[name])
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(content[first : self.server.ends_after])
        if self.server.stalls is not None:
            self.server.stalls.wait()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server as long as the block."""
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()
