"""A small Kubernetes API over real HTTP, for what a client must bear: conflicts, absences, watches that break.

It keeps any object of any path, with resource versions as the real one counts them; it runs nothing. Tests play the
cluster: they change objects, write logs, and cut watches.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]


class KubernetesServer:
    """The server and what it holds, by path of the collection and name. A context."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.collections: dict[str, dict[str, Object]] = {}
        self.events: list[tuple[int, str, str, Object]] = []
        self.version = 100
        self.oldest = 0
        self.logs: dict[str, list[tuple[float, str]]] = {}
        self.requests: list[str] = []
        self.cuts = 0
        self.refused = ""
        self.unknown = ""
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), lambda *words: _Handler(self, *words))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> KubernetesServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut_watches()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def put(
        self, collection: str, name: str, change: Callable[[Object], None] | None, kind: str = "MODIFIED"
    ) -> Object:
        """Change an object, make it, or with None remove it; tells every watch."""
        with self.changed:
            self.version += 1
            held = self.collections.setdefault(collection, {})
            made = held.setdefault(name, {"metadata": {"name": name}})
            if change is None:
                del held[name]
            else:
                change(made)
            made["metadata"]["resourceVersion"] = str(self.version)
            copied = json.loads(json.dumps(made))
            self.events.append((self.version, collection, kind, copied))
            self.changed.notify_all()
            return dict(copied)

    def say(self, pod: str, text: str, at: float | None = None) -> None:
        """Have a pod print a line."""
        self.logs.setdefault(pod, []).append((time.time() if at is None else at, text))

    def cut_watches(self) -> None:
        """Break every watch in the middle of a line."""
        with self.changed:
            self.cuts += 1
            self.changed.notify_all()

    def forget(self) -> None:
        """Hold no history: who resumes from before now is too late."""
        with self.changed:
            self.oldest = self.version


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, server: KubernetesServer, *words: Any) -> None:
        self.world = server
        super().__init__(*words)

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        collection, body = self._path(), self._body()
        name = body["metadata"]["name"]
        if name in self.world.collections.get(collection, {}):
            return self._refuse(409, f'{collection} "{name}" already exists')
        if self.world.unknown and self.world.unknown in json.dumps(body):
            if self._query().get("fieldValidation") == "Strict":
                return self._refuse(400, f'strict decoding error: unknown field "spec.{self.world.unknown}"')
            body["spec"].pop(self.world.unknown)
        body.setdefault("status", {})
        body["metadata"]["uid"] = f"uid-of-{name}"
        self._answer(201, self.world.put(collection, name, lambda made: made.update(body), "ADDED"))

    def do_PATCH(self) -> None:
        collection, _, name = self._path().rpartition("/")
        body = self._body()
        if name not in self.world.collections.get(collection, {}):
            return self._refuse(404, f'"{name}" not found')
        self._answer(200, self.world.put(collection, name, lambda made: made["metadata"].update(body["metadata"])))

    def do_DELETE(self) -> None:
        collection, _, name = self._path().rpartition("/")
        self._body()
        if name not in self.world.collections.get(collection, {}):
            return self._refuse(404, f'"{name}" not found')
        self._answer(200, self.world.put(collection, name, None, "DELETED"))

    def do_GET(self) -> None:
        path, query = self._path(), self._query()
        if self.world.refused and path.endswith(self.world.refused):
            return self._refuse(403, f"{self.world.refused} is forbidden")
        if path.endswith("/log"):
            return self._log(path.split("/")[-2], query)
        collection, _, name = path.rpartition("/")
        held = self.world.collections
        if name in held.get(collection, {}):
            return self._answer(200, held[collection][name])
        if not path.endswith(("pods", "sets", "jobs")):
            return self._refuse(404, f'"{name}" not found')
        if query.get("watch") in ("true", "True"):
            return self._watch(path, query)
        with self.world.changed:
            items = [item for item in held.get(path, {}).values() if _chosen(item, query)]
            listed = {"kind": "List", "metadata": {"resourceVersion": str(self.world.version)}, "items": items}
        self._answer(200, listed)

    def _watch(self, path: str, query: dict[str, str]) -> None:
        since = int(query["resourceVersion"])
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if since < self.world.oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            self._chunk(json.dumps({"type": "ERROR", "object": gone}) + "\n")
            return self._chunk("")
        cuts = self.world.cuts
        while True:
            with self.world.changed:
                news = [e for e in self.world.events if e[0] > since and e[1] == path and _chosen(e[3], query)]
                if not news and self.world.cuts == cuts:
                    self.world.changed.wait()
            if self.world.cuts != cuts:
                self._chunk('{"type": "MODI')
                self.close_connection = True
                return
            for since, _, kind, made in news:  # noqa: B007  (the last version is where to continue)
                self._chunk(json.dumps({"type": kind, "object": made}) + "\n")

    def _log(self, pod: str, query: dict[str, str]) -> None:
        if pod not in self.world.logs:
            return self._refuse(404, f'pods "{pod}" not found')
        since = time.time() - float(query["sinceSeconds"]) if "sinceSeconds" in query else 0.0
        lines = [f"{_stamp(at)} {text}\n" for at, text in self.world.logs[pod] if at >= since]
        self._send(200, "".join(lines).encode()[: int(query["limitBytes"])], "text/plain")

    def _path(self) -> str:
        self.world.requests.append(f"{self.command} {self.path}")
        return urlsplit(self.path).path

    def _query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}

    def _body(self) -> Object:
        return dict(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}"))

    def _refuse(self, code: int, message: str) -> None:
        self._answer(code, {"kind": "Status", "status": "Failure", "code": code, "message": message})

    def _answer(self, code: int, body: Object) -> None:
        self._send(code, json.dumps(body).encode() + b"\n", "application/json")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def _chosen(item: Object, query: dict[str, str]) -> bool:
    wanted = query.get("labelSelector")
    return wanted is None or wanted in (item["metadata"].get("labels") or {})


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
