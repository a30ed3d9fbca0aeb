"""`failure`: derive why a launcher failed from its exit code and files."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from pathlib import Path
from typing import Any

from phalanx.jobs.attempt.files import DETAIL_BYTES, ExitRecord
from phalanx.jobs.models import Cause
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.launch.reports.log_tail import last_lines
from phalanx.launch.reports.logs import ENDED

_LAST_LINES = 30
_MISUSED = 2
"""Exit code of `phalanx run` for flags or hosts that cannot work."""

_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
"""How torchrun reports which rank failed first; with another wording the rank stays unknown."""


def failure(spec: TrainingJob, node: int, code: int, *, output: Path, logs: Path) -> ExitRecord:
    """Return the exit record, without times, of a node whose command ended with an error.

    Args:
        spec: The job.
        node: Number of the node.
        code: Exit code of the command, negative for a signal.
        output: File of what the command, or its launcher, printed.
        logs: Folder of this node's logs.
    """
    if spec.launch == "env":
        return _failed(f"node {node} {describe_exit(code)}", rank=node, code=code, detail=read_tail(output))
    if spec.launch == "torchrun":
        return _torchrun(code, output, logs)
    return _phalanx(code, output, logs)


def describe_exit(code: int) -> str:
    """Return in words how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    is_known = -code in set(signal.Signals)
    return f"was ended by signal {-code} ({signal.Signals(-code).name if is_known else 'unknown'})"


def read_tail(path: Path) -> str:
    """Return the last lines of a log, bounded."""
    return "\n".join(last_lines(str(path), _LAST_LINES))[-DETAIL_BYTES:]


def _failed(message: str, *, rank: int | None, code: int, detail: str, cause: Cause = Cause.USER_CODE) -> ExitRecord:
    return ExitRecord("failed", cause, message, rank, code, detail[-DETAIL_BYTES:])


def _phalanx(code: int, output: Path, logs: Path) -> ExitRecord:
    with contextlib.suppress(KeyError, TypeError):  # the job wrote something else there
        if record := _reported(_read(logs / ENDED), code):
            return record
    cause = Cause.SETUP if code == _MISUSED else Cause.USER_CODE
    return _failed(f"the launcher {describe_exit(code)}", rank=None, code=code, detail=read_tail(output), cause=cause)


def _reported(ended: dict[str, Any], code: int) -> ExitRecord | None:
    """Return what the launcher reported of the end of a job, or None if it could not."""
    if first := ended.get("first"):
        rank = first["rank"] if first["role"] == "worker" else None
        detail = first["traceback"] or "\n".join(first["last_lines"])
        cause = Cause.HANG if first.get("kind") == "hang" else Cause.USER_CODE
        return _failed(f"{first['title']} {ended['said']}", rank=rank, code=first["code"], detail=detail, cause=cause)
    if message := ended.get("message"):
        # Another node did not join, or is lost: its own record has the reason, if it could write one.
        cause = Cause.NODE_FAILURE if ended["error"] == "PeerLostError" else Cause.SETUP
        return _failed(str(message), rank=None, code=code, detail="", cause=cause)
    return None


def _torchrun(code: int, output: Path, logs: Path) -> ExitRecord:
    matches = _ROOT_CAUSE.findall(read_tail(output))
    if not matches:
        return _failed(f"torchrun {describe_exit(code)}", rank=None, code=code, detail=read_tail(output))
    rank, exit_code = (int(number) for number in matches[-1])
    return _failed(
        f"rank {rank} {describe_exit(exit_code)}",
        rank=rank,
        code=exit_code,
        detail=read_tail(logs / f"workerlog.{rank}"),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}  # There is none, or the job, which may write here too, left something else.
    return report if isinstance(report, dict) else {}
