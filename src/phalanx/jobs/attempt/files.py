"""`AttemptSpec`, `ExitRecord`: files of an attempt shared by backend and nodes: spec, heartbeats, exit records."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import BackendError
from phalanx.files import write_atomically
from phalanx.jobs import paths
from phalanx.jobs.backend import Submission
from phalanx.jobs.models import Cause
from phalanx.jobs.spec.training_job import TrainingJob

HEARTBEAT_S = 2.0
"""Seconds between two heartbeats of a node."""

LOST_AFTER_HEARTBEATS = 15
"""After how many beats that did not come a node counts as lost."""

DETAIL_BYTES = 8192
"""Most text of a traceback or of last lines in an exit record."""

_ROOM_BYTES = 64 * 2**10


@dataclass(frozen=True)
class AttemptSpec:
    """What every node of an attempt reads before it starts. Holds no secret."""

    job: str
    attempt: int
    spec: TrainingJob
    home: Path
    """Folder of code and datasets, as the nodes see it."""

    checkpoint: Path
    """The folder that survives attempts, made by the nodes."""


@dataclass(frozen=True)
class ExitRecord:
    """How one node ended. `outcome` is succeeded, failed or stopped (by a signal from outside, or with another node).

    `rank` is the first to fail of the whole job where the launcher knows it; `exit_code` negative for a signal.
    Times are seconds since the epoch.
    """

    outcome: str
    cause: Cause | None = None
    message: str = ""
    rank: int | None = None
    exit_code: int | None = None
    detail: str = ""
    started: float = 0.0
    ended: float = 0.0


def all_succeeded(records: Iterable[ExitRecord | None]) -> bool:
    """Return whether every node left an exit record, and none but of success."""
    return all(record is not None and record.outcome == "succeeded" for record in records)


def deciding_records(records: dict[int, ExitRecord | None], *, has_ended: bool) -> dict[int, ExitRecord | None]:
    """Return the exit records that say how an elastic attempt ends: those of success, or all where it has ended.

    Args:
        records: What each node wrote about its end; None where it wrote nothing.
        has_ended: Whether no node runs any more.
    """
    succeeded: dict[int, ExitRecord | None] = {
        node: record for node, record in records.items() if record is not None and record.outcome == "succeeded"
    }
    if succeeded or has_ended:
        return succeeded or records
    return dict.fromkeys(records)


def any_failed(records: Iterable[ExitRecord | None]) -> bool:
    """Return whether a node left the exit record of a failure."""
    return any(record is not None and record.outcome == "failed" for record in records)


def spec_json(submission: Submission, home: str = "", job_folder: str = "") -> dict[str, Any]:
    """Return what the nodes of `submission` are to do, as JSON.

    Args:
        submission: The attempt.
        home: PHALANX_HOME as the nodes see it; empty where they see ours.
        job_folder: The job's folder as the nodes see it; empty where they see ours.
    """
    folder = submission.folder
    return {
        "job": submission.job,
        "attempt": submission.attempt,
        "spec": submission.spec.model_dump(mode="json"),
        "home": str(home or folder.parents[2]),
        "checkpoint": str(paths.checkpoints(Path(job_folder or folder.parent), submission.spec.checkpoint.dir)),
    }


def write_spec(submission: Submission) -> Path:
    """Make the attempt's folder, with the order for its nodes; doing it again changes nothing.

    Returns:
        The file of the order.
    """
    paths.logs(submission.folder).mkdir(parents=True, exist_ok=True)
    path = submission.folder / "attempt.json"
    write_atomically(path, json.dumps(spec_json(submission), indent=1))
    return path


def read_spec(folder: Path) -> AttemptSpec:
    """Return what the nodes of the attempt in `folder` are to do.

    Raises:
        BackendError: If there is no order, or this version cannot read it.
    """
    path = folder / "attempt.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return AttemptSpec(
            job=fields["job"],
            attempt=fields["attempt"],
            spec=TrainingJob.model_validate(fields["spec"]),
            home=Path(fields["home"]),
            checkpoint=Path(fields["checkpoint"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BackendError(
            f"{path} does not say what to run: {error}. Nodes need the same files and the same version of phalanx as "
            "the machine that submitted the job."
        ) from None


def write_heartbeat(folder: Path, node: int, activity: str) -> None:
    """Say that node `node` lives, and what it does: `preparing code`, `running`, ..."""
    path = paths.heartbeat(folder, node)
    if _text(path) == activity:
        os.utime(path)
    else:
        write_atomically(path, activity)


def read_activity(folder: Path, node: int) -> str:
    """Return what node `node` does, from its last heartbeat; empty before the first."""
    return _text(paths.heartbeat(folder, node))


def reserve_exit_record(folder: Path, node: int) -> None:
    """Take the space that the exit record of node `node` may need: why a job fails may be that the disk is full."""
    _room(folder, node).write_bytes(bytes(_ROOM_BYTES))


def write_exit_record(folder: Path, node: int, record: ExitRecord) -> None:
    """Leave the exit record of node `node`, whole or not at all, in the room that was made for it if there is any."""
    room = _room(folder, node)
    if not room.exists():
        write_atomically(paths.exit_record(folder, node), exit_record_json(record))
        return
    with room.open("r+b") as file:
        file.write(exit_record_json(record).encode())
        file.truncate()
    room.rename(paths.exit_record(folder, node))


def exit_record_json(record: ExitRecord) -> str:
    """Return an exit record as text."""
    return json.dumps(asdict(record))


def read_exit_record(folder: Path, node: int) -> ExitRecord | None:
    """Return how node `node` ended, or None while it left no record; what is no record counts as a failure."""
    text = _text(paths.exit_record(folder, node))
    try:
        return parse_exit_record(text) if text else None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return ExitRecord("failed", Cause.SETUP, f"the exit record of node {node} cannot be read: {error}")


def parse_exit_record(text: str) -> ExitRecord:
    """Undo `exit_record_json`."""
    values = json.loads(text)
    return ExitRecord(**{**values, "cause": values["cause"] and Cause(values["cause"])})


def _room(folder: Path, node: int) -> Path:
    return folder / f".{paths.exit_record(folder, node).name}.room"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")  # jobs write here too
    except FileNotFoundError:
        return ""
