"""`save`: coordinate a consistent snapshot of the tables of all servers.

Every participant holds changes back, reports each worker's step, and lets through what another participant has
already, so that a worker's step is in the snapshot on all participants or on none. Then each notes its moment;
changes continue while it writes. The manifest comes last, in one step: a save that is killed leaves the snapshot before
it as it was.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import BackendError, ConfigError
from phalanx.files import sync_file_system
from phalanx.ps.snapshot.callers import Caller, ask_all, collect_results, resume_all
from phalanx.ps.snapshot.dense import write_extra
from phalanx.ps.snapshot.manifest import (
    MANIFEST,
    BaseSnapshot,
    SnapshotFile,
    SnapshotManifest,
    check_mode,
    read_manifest,
    write_manifest,
)
from phalanx.ps.snapshot.moment import furthest_steps
from phalanx.ps.snapshot.participant import SnapshotParticipant
from phalanx.ps.snapshot.write import TableMoments, WriteRequest, write
from phalanx.ps.table.rules import TableSpec, table_spec
from phalanx.ps.wire.message import RpcReply

FREEZE_S = 10.0
"""Longest that changes are held back."""

_OURS = re.compile(
    r"(?:(?:shard-\d{4}|dense)-(?P<save>[0-9a-f]{8})\.\w+|(?:part-\d+|manifest\.json)\.(?P<part>[0-9a-f]{8}))"
)
_log = logging.getLogger("phalanx.ps")


def save(calls: Sequence[Caller], directory: Path, extra: Mapping[str, object], mode: str = "full") -> SnapshotManifest:
    """Write a snapshot of all tables at one moment, and what goes with them.

    One process calls it; training continues while the files are written.

    Args:
        calls: one per participant, by its number.
        directory: Folder of the snapshot, the same on all hosts; made if missing. A snapshot in it is replaced when the
            new one is whole.
        extra: JSON values and tensors, in dicts, lists and tuples.
        mode: `full`; `delta`: what changed since the last full one; `serving`, `serving_bf16` or `serving_int8`: values
            alone; `text`: `part-<number>` with a line `table, id, values` per row.

    Returns:
        What was written.

    Raises:
        ConfigError: If the mode is unknown, or a delta has no full snapshot to be made on.
        BackendError: If a file system does not take the files; the snapshot that was there stays.
        PeerLostError: If a participant is gone.
    """
    checked_mode, name = check_mode(mode), secrets.token_hex(4)
    directory = Path(directory).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"Asked to save to {directory}: {e.strerror}. Give a folder that can be made.") from e
    replaced = _replaced_text_files(directory, checked_mode)
    started = time.monotonic()
    try:
        states, base = _freeze_and_begin(calls, name, directory, checked_mode)
        frozen_s = time.monotonic() - started
        value, dense = write_extra(directory, name, extra)
        written = collect_results(calls, name)
        manifest = SnapshotManifest(
            save=name,
            mode=checked_mode,
            tables=_specs(states),
            rows={t: sum(w["rows"].get(t, 0) for w in written) for t in _specs(states)},
            files={number: SnapshotFile(*facts) for w in written for number, facts in w["files"].items()},
            extra=value,
            base=base,
            dense=dense,
            leases=states[0].get("leases") or None,
            steps=states[0].get("pushed") or None,
            servers=len(calls),
        )
        _check_shared_folder(directory, manifest)
        write_manifest(directory, manifest)
    except BaseException as e:
        _delete_files(directory, lambda save: save == name)
        if isinstance(e, OSError):
            raise disk_error(directory, e) from e
        raise
    _delete_files(directory, lambda save: save != name)
    for file in replaced - {file.name for file in manifest.files.values()}:
        (directory / file).unlink(missing_ok=True)
    took, size = time.monotonic() - started, sum(w["bytes"] for w in written)
    _log.info("snapshot %s: %d bytes in %.1f s; held changes back for %.3f s", directory, size, took, frozen_s)
    return manifest


def _freeze_and_begin(
    calls: Sequence[Caller], name: str, directory: Path, mode: str
) -> tuple[list[dict[str, Any]], BaseSnapshot | None]:
    """Hold all changes back, begin the snapshot everywhere, and let go; returns each participant's state."""
    freeze = {"token": name, "seconds": FREEZE_S}
    try:
        states = ask_all(calls, "freeze", freeze)
        furthest = furthest_steps(states)
        if any(state["steps"] != furthest for state in states):
            # A worker may have to get past one server before it can reach its step on another: none waits before all
            # let the steps through.
            for wait in (False, True):
                states = ask_all(calls, "freeze", {**freeze, "steps": furthest, "wait": wait})
        _check_moment(states, name)
        base = _base(states, directory) if mode == "delta" else None
        request = {"token": name, "directory": str(directory), "save": name, "mode": mode}
        ask_all(calls, "snapshot", {**request, **({"base": base.save, "base_tables": base.tables} if base else {})})
    finally:
        resume_all(calls, name)
    return states, base


def _check_moment(states: Sequence[Mapping[str, Any]], name: str) -> None:
    """Check that all participants stopped at the same pushes: one may have let go at its deadline in between.

    Raises:
        BackendError: If they did not.
    """
    pushed = [state.get("pushed") for state in states]
    if any(steps != pushed[0] for steps in pushed):
        raise BackendError(
            f"Snapshot {name} has no one moment: the servers stopped at the workers' steps {pushed}, because one let "
            "training go at its deadline or was started again. Save again; if it comes back, a server takes too long "
            "to answer."
        )


def _specs(states: Sequence[Mapping[str, Any]]) -> dict[str, TableSpec]:
    return {spec.name: spec for spec in map(table_spec, states[0]["specs"])}


def _base(states: Sequence[Mapping[str, Any]], directory: Path) -> BaseSnapshot:
    """Return the newest full snapshot that every participant took part in and that is still there."""
    fulls = [{save: (where, names) for save, where, names in state["fulls"]} for state in states]
    for save, (where, names) in fulls[0].items():
        shared = set(names).intersection(*(of_participant.get(save, ("", ()))[1] for of_participant in fulls))
        if all(save in of_participant for of_participant in fulls) and _holds(Path(where), save):
            if Path(where) == directory:
                raise ConfigError(
                    f"Asked for a delta in {directory}, which holds the full snapshot it is made on. Give it a folder "
                    "of its own; reading it takes both."
                )
            return BaseSnapshot(save, os.path.relpath(where, directory), sorted(shared))
    raise ConfigError(
        "Asked for a delta, but this job has no full snapshot that it could be made on. Save with mode 'full' first."
    )


def _holds(directory: Path, save: str) -> bool:
    return (directory / MANIFEST).exists() and read_manifest(directory, check_files=False).save == save


def _check_shared_folder(directory: Path, manifest: SnapshotManifest) -> None:
    for file in manifest.files.values():
        if not (directory / file.name).exists():
            raise ConfigError(
                f"A server wrote {file.name} to {directory}, but it is not there on this host. Save to a folder that "
                "all hosts share."
            )


def _replaced_text_files(directory: Path, mode: str) -> set[str]:
    """Return the names of the text files of the snapshot that is replaced: they name no save.

    Raises:
        ConfigError: If a text export would overwrite files that no snapshot names.
    """
    if (directory / MANIFEST).exists():
        manifest = read_manifest(directory, check_files=False)
        return {file.name for file in manifest.files.values()} if manifest.mode == "text" else set()
    if mode == "text" and any(directory.glob("part-*")):
        raise ConfigError(
            f"Asked for a text export to {directory}, which holds other files named part-*. Give it another folder."
        )
    return set()


def _delete_files(directory: Path, unwanted: Callable[[str], bool]) -> None:
    """Delete files of saves that no manifest names any more."""
    for path in directory.iterdir():
        match = _OURS.fullmatch(path.name)
        if match and unwanted(match["save"] or match["part"]):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """A reply that is there already."""

    reply: RpcReply

    def result(self) -> RpcReply:
        """Return it."""
        return self.reply


class LocalCalls:
    """Answers a save in the process that holds the tables, which it does not change meanwhile."""

    def __init__(self, participant: SnapshotParticipant) -> None:
        self._participant = participant
        self._result: dict[str, Any] = {}

    def send(self, op: str, meta: Mapping[str, Any]) -> LocalAnswer:
        """Answer one request of `save`."""
        return LocalAnswer(self._answer(op, meta))

    def _answer(self, op: str, meta: Mapping[str, Any]) -> RpcReply:
        if op == "freeze":
            specs = [table.spec.to_json() for table in self._participant.tables.values()]
            return RpcReply({"steps": [], "fulls": self._participant.fulls, "specs": specs})
        if op == "snapshot":
            self._write(self._participant.write_request(meta))
        return RpcReply({"done": True, "result": self._result} if op == "saved" else {})

    def _write(self, request: WriteRequest) -> None:
        moments = TableMoments(self._participant.tables, request.since)
        try:
            self._result = write(request, moments)
            sync_file_system(request.directory)
        except OSError as e:
            raise disk_error(request.directory, e) from e
        finally:
            moments.end()


def save_local(
    participant: SnapshotParticipant, directory: Path, extra: Mapping[str, object], mode: str = "full"
) -> SnapshotManifest:
    """Write a snapshot of the tables in this process. See `save`."""
    return save([LocalCalls(participant)], directory, extra, mode)


def disk_error(directory: Path, error: OSError) -> BackendError:
    """Return the error of a file system that does not take a snapshot."""
    free = shutil.disk_usage(directory).free
    return BackendError(
        f"A snapshot was to be written to {directory}, which has {free} bytes free: {error.strerror}. The snapshot "
        "that was there stays; make room and save again."
    )
