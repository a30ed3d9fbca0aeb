"""`SnapshotReplica`: the tables of a snapshot, replaced when a newer one is saved into its folder."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.ps.serving.view import TableView
from phalanx.ps.snapshot.manifest import MANIFEST
from phalanx.ps.snapshot_lookup import Lookup

POLL_S = 1.0

_log = logging.getLogger("phalanx.ps")


class SnapshotReplica:
    """Tables of a snapshot of any mode but text.

    A newer one is loaded beside that which is read, and takes its place in one step. One that cannot be read is said
    in the log, once, and the older one stays.

    Args:
        directory: Its folder.
        poll_s: Seconds between two looks at its manifest.

    Raises:
        ConfigError: If the folder holds no snapshot.
        DataError: If it is broken; names the file.
    """

    def __init__(self, directory: Path, poll_s: float = POLL_S) -> None:
        self._directory = directory
        self._manifest = self._stamp()
        self._view = self._load()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(poll_s,), name="snapshot", daemon=True)
        self._thread.start()

    def view(self) -> TableView:
        """Return the tables of the newest snapshot that is loaded; its version is the name of the save."""
        return self._view

    def close(self) -> None:
        """Look no more for newer snapshots."""
        self._stopped.set()
        self._thread.join()

    def refresh(self) -> None:
        """Load the snapshot if its manifest was written again."""
        stamp = self._stamp()
        if stamp is None or stamp == self._manifest:
            return
        self._manifest = stamp
        try:
            self._view = self._load()
        except PhalanxError as error:
            _log.warning("save %s stays: the newer one cannot be read. %s", self._view.version, error)
        else:
            _log.info("%s: save %s", self._directory, self._view.version)

    def _watch(self, poll_s: float) -> None:
        while not self._stopped.wait(poll_s):
            self.refresh()

    def _load(self) -> TableView:
        stamp = self._stamp()
        lookup = Lookup(self._directory)
        as_of = 0.0 if stamp is None else stamp[0] / 1e9
        manifest = lookup.snapshot.manifest
        return TableView([lookup.tables], manifest.save, as_of, manifest.steps or ())

    def _stamp(self) -> tuple[int, int] | None:
        """Return when the manifest was written, in nanoseconds, and its inode; None while there is none."""
        try:
            status = (self._directory / MANIFEST).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino
