"""`Informer`: a cache of Kubernetes objects, by list and watch with backoff."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from phalanx.errors import BackendError

logger = logging.getLogger("phalanx.jobs")

WATCH_S = 300
"""How long one watch is asked to last; servers end them when they like."""

REQUEST_S = 30.0
"""How long one request may take, a watch beyond its own time."""

_TROUBLE = (ApiException, HTTPError, OSError, ValueError, KeyError)
"""What a cluster that refuses, is gone or talks nonsense comes to."""

_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 30.0


class Informer:
    """The objects that one list call of the client gives, by name. Any thread may ask.

    Args:
        what: What is watched, for messages.
        call: A list function of the client, its arguments bound.
    """

    def __init__(self, what: str, call: Callable[..., Any]) -> None:
        self._what, self._call = what, call
        self._objects: dict[str, Mapping[str, Any]] = {}
        self._version = ""
        self._error: str | None = "not listed yet"
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def objects(self) -> dict[str, Mapping[str, Any]]:
        """Return the objects as last seen.

        Raises:
            BackendError: While the server cannot be reached, or refuses.
        """
        with self._changed:
            if self._thread is None:
                self._list()
                self._thread = threading.Thread(target=self._run, daemon=True, name=f"watch {self._what}")
                self._thread.start()
            if self._error is not None:
                raise BackendError(f"Kubernetes does not tell of {self._what}: {self._error}")
            return dict(self._objects)

    def close(self) -> None:
        """Watch no longer; the thread ends with its present watch."""
        self._closed.set()

    def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._closed.is_set():
            try:
                if self._error is None:
                    self._follow()
                    wait_s = _FIRST_WAIT_S
                    continue
            except _TROUBLE as error:
                logger.info("the watch of %s broke: %s", self._what, _first_line(error))
            with self._changed:
                self._list()
            # A watch that breaks as soon as it is open, and a cluster that is gone, are asked less and less often.
            self._closed.wait(wait_s)
            wait_s = min(2 * wait_s, _MOST_WAIT_S)

    def _list(self) -> None:
        """List all objects; an error is kept for the next call of `objects`."""
        try:
            listing = json.loads(raise_for_status(self._call(_preload_content=False, _request_timeout=REQUEST_S)).data)
            self._objects = {item["metadata"]["name"]: item for item in listing["items"]}
            self._version = listing["metadata"]["resourceVersion"]
        except _TROUBLE as error:
            self._error = _first_line(error)
            return
        self._error = None

    def _follow(self) -> None:
        """Take what changes from the version on that was seen last, until the server ends the watch."""
        stream = self._call(
            watch=True,
            resource_version=self._version,
            timeout_seconds=WATCH_S,
            allow_watch_bookmarks=True,
            _preload_content=False,
            _request_timeout=(REQUEST_S, WATCH_S + REQUEST_S),
        )
        for line in _lines(raise_for_status(stream)):
            event = json.loads(line)
            raw = event["object"]
            if event["type"] == "ERROR":
                raise ApiException(status=raw.get("code"), reason=raw.get("message"))
            with self._changed:
                self._version = raw["metadata"]["resourceVersion"]
                if event["type"] == "DELETED":
                    self._objects.pop(raw["metadata"]["name"], None)
                elif event["type"] != "BOOKMARK":
                    self._objects[raw["metadata"]["name"]] = raw
            if self._closed.is_set():
                return


def error_message(error: ApiException) -> str:
    """Return why the cluster refuses, in its words."""
    try:
        message = json.loads(error.body or "")["message"]
    except (TypeError, ValueError, KeyError):
        message = error.reason
    return f"{message} ({error.status})"


def raise_for_status(response: Any) -> Any:
    """Return what the client gave, or raise ApiException for a response of an error, which it lets pass unread."""
    status = getattr(response, "status", None)
    if isinstance(status, int) and status >= 400:
        error = ApiException(status=status, reason=getattr(response, "reason", None))
        error.body = response.data
        raise error
    return response


def _lines(stream: Any) -> Iterator[bytes]:
    """Yield whole lines of a response as they come; half a line at its end is a watch that broke."""
    rest = b""
    try:
        for piece in stream.stream(amt=None, decode_content=False):
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line for line in whole if line.strip())
    finally:
        stream.close()
        stream.release_conn()


def _first_line(error: Exception) -> str:
    if isinstance(error, ApiException):
        return error_message(error)
    return str(error).strip().split("\n")[0] or type(error).__name__
