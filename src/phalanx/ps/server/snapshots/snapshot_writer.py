"""`SnapshotWriter`: write a server's part of a snapshot in threads, from one moment, while the server continues."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from phalanx.errors import BackendError, InternalError, PhalanxError
from phalanx.files import sync_file_system
from phalanx.ps.snapshot.save import disk_error
from phalanx.ps.snapshot.write import TableMoments, WriteRequest, write
from phalanx.ps.table.table import RowTable


class SnapshotWriter:
    """Writes tables as they are when this is made, and makes the files durable. Any thread may call it.

    Args:
        request: What to write where.
        tables: By name; nothing may change them until this is made.
    """

    def __init__(self, request: WriteRequest, tables: Mapping[str, RowTable]) -> None:
        self._request, self._moments = request, TableMoments(tables, request.since)
        self._stopping = threading.Event()
        self._result: dict[str, Any] | PhalanxError = {}
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._moments.end()
            raise

    def stop(self) -> None:
        """Give the files up; the thread ends soon."""
        self._stopping.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the thread has ended, at most so many seconds; returns whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> dict[str, Any]:
        """Return what `write` returned; waits for it.

        Raises:
            BackendError: If the disk did not take it, or it was given up.
        """
        self._thread.join()
        if isinstance(self._result, PhalanxError):
            raise self._result
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._write()
        except PhalanxError as e:
            self._result = e
        except Exception as e:  # noqa: BLE001 -- `result` raises it
            self._result = InternalError(f"A snapshot was not written: {e!r}. Please report it.")
        finally:
            self._moments.end()

    def _write(self) -> dict[str, Any]:
        directory = self._request.directory
        try:
            result = write(self._request, self._moments, self._check)
            sync_file_system(directory)
        except OSError as e:
            raise disk_error(directory, e) from e
        return result

    def _check(self) -> None:
        if self._stopping.is_set():
            raise BackendError(
                f"A snapshot was to be written to {self._request.directory}, but its server ended before it was whole. "
                "The snapshot that was there stays; save again."
            )
