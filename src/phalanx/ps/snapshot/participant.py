"""`SnapshotParticipant`: one process's part in a snapshot, full or delta."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.ps.snapshot.manifest import check_mode
from phalanx.ps.snapshot.read import SnapshotSource
from phalanx.ps.snapshot.write import WriteRequest
from phalanx.ps.table.table import RowTable

_REMEMBERED = 4


class SnapshotParticipant:
    """A server's tables, or those of a process without servers.

    Args:
        tables: By name; the mapping is read again at each save.
        shards: Virtual shards held here.
        part: Number of this participant.
    """

    def __init__(self, tables: Mapping[str, RowTable], shards: Sequence[int], part: int = 0) -> None:
        self.tables, self._shards, self._part = tables, shards, part
        self._fulls: dict[str, dict[str, Any]] = {}

    def write_request(self, meta: Mapping[str, Any]) -> WriteRequest:
        """Return what to write now.

        Args:
            meta: `directory`, `save`, `mode` and for a delta `base`, the save it is made on, and `base_tables`.
        """
        mode = check_mode(meta["mode"])
        ticks = self._fulls[meta["base"]]["ticks"] if mode == "delta" else {}
        since = {name: ticks[name] for name in meta["base_tables"]} if mode == "delta" else {}
        request = WriteRequest(Path(meta["directory"]), meta["save"], mode, self._shards, self._part, since)
        if mode == "full":
            self._remember(meta["save"], meta["directory"], self.tables)
        return request

    def remember_load(self, source: SnapshotSource, names: Sequence[str]) -> None:
        """Note that these tables are now as the snapshot they were loaded from, if a delta can be made on that."""
        manifest = source.snapshot.manifest
        if names and manifest.mode == "full":
            self._remember(manifest.save, source.snapshot.directory.absolute(), names)

    @property
    def fulls(self) -> list[list[Any]]:
        """Full snapshots a delta can be made on, newest first: save, folder and names of tables."""
        return [[save, f["directory"], sorted(f["ticks"])] for save, f in reversed(self._fulls.items())]

    def to_json(self) -> dict[str, Any]:
        """Return what must outlive the process."""
        return self._fulls

    def restore(self, value: Mapping[str, Any]) -> None:
        """Take over what `to_json` returned, as far as the tables' ticks have advanced from there."""
        for save, full in value.items():
            if all(name in self.tables and self.tables[name].tick >= tick for name, tick in full["ticks"].items()):
                self._fulls[save] = full

    def _remember(self, save: str, directory: str | Path, names: Iterable[str]) -> None:
        """Note that these tables are now as a full snapshot has them."""
        ticks = {name: self.tables[name].tick for name in names}
        previous = self._fulls.pop(save, {"ticks": {}})
        self._fulls[save] = {"directory": str(directory), "ticks": {**previous["ticks"], **ticks}}
        while len(self._fulls) > _REMEMBERED:
            del self._fulls[next(iter(self._fulls))]
