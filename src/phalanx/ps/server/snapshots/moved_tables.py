"""`write_bases`: what the servers of a job have written, as the bases that another number of servers recovers from.

A shard is in one file, whatever the number of servers, so files are given to their new owners and not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.files import sync_file_system, write_atomically
from phalanx.ps.server.moved_state import state_of
from phalanx.ps.snapshot.manifest import SnapshotFile, SnapshotManifest, write_manifest
from phalanx.ps.table.placement import SHARDS, shards_owned
from phalanx.ps.table.rules import table_spec

_BASE = "base-00000001"
"""The log begins behind it, with segment 1."""


def write_bases(
    folder: Path,
    servers: int,
    *,
    job: str,
    files: Path,
    states: Sequence[Mapping[str, Any]],
    written: Sequence[Mapping[str, Any]],
) -> None:
    """Make a folder of state for each of the new servers, durably.

    Args:
        folder: Where these folders go, by the servers' numbers; they are not there.
        servers: How many new servers.
        job: Name of the job.
        files: Folder of what was written; on the file system of `folder`, and empty afterwards.
        states: State of each server there was.
        written: What each wrote of a full snapshot; see `snapshot.write.write`.

    Raises:
        OSError: If the file system does not take them.
    """
    shards = {int(shard): SnapshotFile(*facts) for part in written for shard, facts in part["files"].items()}
    specs = {spec.name: spec for spec in map(table_spec, states[0]["specs"])}
    rows = {name: sum(part["rows"].get(name, 0) for part in written) for name in specs}
    for server in range(servers):
        base = folder / str(server) / _BASE
        base.mkdir(parents=True)
        write_atomically(base.parent / "job", job)
        own = {shard: shards[shard] for shard in shards_owned(server, servers) if shard in shards}
        for file in own.values():
            (files / file.name).rename(base / file.name)
        # How many rows its shards have is in the files alone; it is for the report of a recovery.
        share = {name: count * len(shards_owned(server, servers)) // SHARDS for name, count in rows.items()}
        named = {str(shard): file for shard, file in own.items()}
        write_manifest(base, SnapshotManifest("00000000", "full", specs, share, named, state_of(server, states)))
    sync_file_system(folder)
