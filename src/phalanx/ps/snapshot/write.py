"""`write`: write a participant's shard files of a snapshot."""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.files import open_atomically
from phalanx.ps.snapshot.manifest import SnapshotMode
from phalanx.ps.snapshot.records import Array, pack
from phalanx.ps.snapshot.shard_threads import map_in_threads
from phalanx.ps.table.arrays import Columns
from phalanx.ps.table.initializers import nearest_bfloat16
from phalanx.ps.table.moment import TableMoment
from phalanx.ps.table.table import RowTable

_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """What to write where."""

    directory: Path
    save: str
    mode: SnapshotMode
    shards: Sequence[int]
    part: int = 0
    """Number of this participant; names its text file."""

    since: Mapping[str, int] = field(default_factory=dict)
    """For a delta: by table, the tick at the base snapshot; a table that is missing is written in full."""


class TableMoments:
    """Tables as they were when this was made.

    Args:
        tables: By name; nothing may change them until this is made.
        since: By table, the tick that a delta begins behind; others are read in full.
    """

    def __init__(self, tables: Mapping[str, RowTable], since: Mapping[str, int]) -> None:
        self.by_name: dict[str, TableMoment] = {}
        try:
            for name, table in tables.items():
                self.by_name[name] = table.moment(since.get(name, 0))
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Let go of them."""
        for moment in self.by_name.values():
            moment.end()


def write(request: WriteRequest, moments: TableMoments, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Write the files of a snapshot in several threads; `sync_file_system` then makes them durable.

    Args:
        request: What to write where.
        moments: What to write: read once.
        check: Called before each shard, by any thread; may raise to give up.

    Returns:
        `files` by shard, each `[name, bytes, checksum]`; `rows` by table; `bytes` and `seconds` of it all.

    Raises:
        OSError: If the file system does not take a file.
    """
    started = time.monotonic()
    rows = Counter(dict.fromkeys(moments.by_name, 0))
    if request.mode == "text":
        files = {str(request.part): _write_text(request, moments, rows, check)}
    else:
        files = dict(_shard_files(request, moments, rows, check))
    return {
        "files": files,
        "rows": dict(rows),
        "bytes": sum(size for _, size, _ in files.values()),
        "seconds": time.monotonic() - started,
    }


Facts = tuple[str, int, int]
"""Name, bytes and checksum of a file."""


def _shard_files(
    request: WriteRequest, moments: TableMoments, rows: Counter[str], check: Callable[[], None]
) -> Iterator[tuple[str, Facts]]:
    def write_one(shard: int) -> tuple[dict[str, int], Facts | None]:
        check()
        return _write_shard(request, moments, shard)

    # One core is left to those who train meanwhile: a push that has to wait for one takes ten times as long.
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1))
    written = map_in_threads(write_one, request.shards, threads=threads, name="snapshot", in_background=True)
    for shard, (shard_rows, facts) in zip(request.shards, written, strict=True):
        rows.update(shard_rows)
        if facts is not None:
            yield str(shard), facts


def _write_shard(request: WriteRequest, moments: TableMoments, shard: int) -> tuple[dict[str, int], Facts | None]:
    """Write a shard of all tables; returns their rows, and the file if one is needed."""
    path = request.directory / f"shard-{shard:04d}-{request.save}.bin"
    rows: dict[str, int] = {}
    checksum, file = 0, None
    with ExitStack() as stack:
        for name, moment in moments.by_name.items():
            columns = moment.export(shard)
            if not _is_needed(columns, request, request.since.get(name)):
                continue
            rows[name] = len(columns.keys)
            header, *rest = pack(*encode(name, shard, columns, request.mode, moment.spec.dim))
            checksum = zlib.crc32(header, checksum)
            file = file or stack.enter_context(path.open("wb"))
            file.writelines([header, *rest])
        return rows, (path.name, file.tell(), checksum) if file else None


def _is_needed(columns: Columns, request: WriteRequest, since: int | None) -> bool:
    """Whether a shard has to be written: an empty one only where a base snapshot says otherwise."""
    if len(columns.keys) or len(columns.waiting_keys) or len(columns.removed):
        return True
    if request.mode != "delta" or since is None:
        return False
    return columns.is_complete or bool(len(columns.days) and columns.days[0] > since)


def encode(
    table: str, shard: int, columns: Columns, mode: SnapshotMode, dim: int
) -> tuple[dict[str, Any], list[Array]]:
    """Return a table's part of a shard as a record; `read.decode` is the inverse."""
    meta = {"table": table, "shard": shard, "tick": columns.tick, "whole": columns.is_complete, "format": mode}
    if mode in ("full", "delta"):
        waiting: list[Array] = [columns.waiting_keys, columns.waiting_ticks, columns.waiting_counts]
        rows: list[Array] = [columns.keys, columns.ticks, columns.rows, *waiting, columns.days]
        if mode == "full":
            return meta, rows
        return {**meta, "format": "changes", "decays": columns.decays}, [*rows, columns.removed]
    values = np.ascontiguousarray(columns.rows[:, :dim])
    if mode == "serving_bf16":
        bits = nearest_bfloat16(values).view(np.uint32) >> np.uint32(16)
        return meta, [columns.keys, bits.astype(np.uint16)]
    if mode == "serving_int8":
        scales = np.abs(values).max(axis=1, initial=0) / np.float32(127)
        steps = np.divide(values, scales[:, None], out=np.zeros_like(values), where=scales[:, None] > 0)
        return meta, [columns.keys, np.rint(steps).astype(np.int8), scales]
    return meta, [columns.keys, values]


def _write_text(request: WriteRequest, moments: TableMoments, rows: Counter[str], check: Callable[[], None]) -> Facts:
    path = request.directory / f"part-{request.part}"
    size = checksum = 0
    with open_atomically(path, temporary=path.with_name(f"{path.name}.{request.save}")) as file:
        for shard in request.shards:
            check()
            for name, moment in moments.by_name.items():
                columns = moment.export(shard)
                text = _lines(name, columns, moment.spec.dim)
                rows[name] += len(columns.keys)
                checksum = zlib.crc32(text, checksum)
                size += len(text)
                file.write(text)
    return path.name, size, checksum


def _lines(table: str, columns: Columns, dim: int) -> bytes:
    name = table.encode("unicode_escape").decode()
    values = columns.rows[:, :dim].tolist()
    # Nine digits give every float32 back.
    return "".join(
        f"{name}\t{key}\t{' '.join(f'{v:.9g}' for v in row)}\n"
        for key, row in zip(columns.keys.tolist(), values, strict=True)
    ).encode()
