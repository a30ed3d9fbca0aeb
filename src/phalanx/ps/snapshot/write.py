"""Write a participant's shard files of a snapshot."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.files import open_atomically
from phalanx.ps.snapshot.manifest import SnapshotMode
from phalanx.ps.snapshot.records import Array, pack
from phalanx.ps.table.arrays import Columns
from phalanx.ps.table.initializers import nearest_bfloat16
from phalanx.ps.table.table import RowTable


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


def write(
    request: WriteRequest, tables: Mapping[str, RowTable], check: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Write the files of a snapshot; `sync_file_system` then makes them durable.

    Args:
        request: What to write where.
        tables: By name; nothing may change them meanwhile.
        check: Called before each shard; may raise to give up.

    Returns:
        `files` by shard, each `[name, bytes, checksum]`; `rows` by table; `bytes` and `seconds` of it all.

    Raises:
        OSError: If the file system does not take a file.
    """
    started = time.monotonic()
    rows = dict.fromkeys(tables, 0)
    if request.mode == "text":
        files = {str(request.part): _write_text(request, tables, rows, check)}
    else:
        files = dict(_shard_files(request, tables, rows, check))
    return {
        "files": files,
        "rows": rows,
        "bytes": sum(size for _, size, _ in files.values()),
        "seconds": time.monotonic() - started,
    }


Facts = tuple[str, int, int]
"""Name, bytes and checksum of a file."""


def _shard_files(
    request: WriteRequest, tables: Mapping[str, RowTable], rows: dict[str, int], check: Callable[[], None]
) -> Iterable[tuple[str, Facts]]:
    for shard in request.shards:
        check()
        records = []
        for name, table in tables.items():
            columns = table.export(shard, request.since.get(name, 0))
            if _is_needed(columns, request, request.since.get(name)):
                rows[name] += len(columns.keys)
                records.append(encode(name, shard, columns, request.mode, table.spec.dim))
        if records:
            yield str(shard), _write_shard(request.directory / f"shard-{shard:04d}-{request.save}.bin", records)


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


def _write_shard(path: Path, records: Iterable[tuple[dict[str, Any], list[Array]]]) -> Facts:
    checksum = 0
    with path.open("wb") as file:
        for meta, arrays in records:
            header, *rest = pack(meta, arrays)
            checksum = zlib.crc32(header, checksum)
            file.write(header)
            file.writelines(rest)
        return path.name, file.tell(), checksum


def _write_text(
    request: WriteRequest, tables: Mapping[str, RowTable], rows: dict[str, int], check: Callable[[], None]
) -> Facts:
    path = request.directory / f"part-{request.part}"
    size = checksum = 0
    with open_atomically(path, temporary=path.with_name(f"{path.name}.{request.save}")) as file:
        for shard in request.shards:
            check()
            for name, table in tables.items():
                columns = table.export(shard)
                text = _lines(name, columns, table.spec.dim)
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
