"""File layout of PHALANX_HOME (pure).

HOME/
    jobs.db  key                           the store, and the key its secrets are encrypted with
    code/DIGEST/                           trees of code, by content
    cache/                                 datasets that were fetched
    jobs/JOB/attempt-N/
        attempt.json                       what every node runs (no secrets)
        work/                              the working copy of the code
        node-K.json                        how node K ended; written by node K, once, by renaming
        node-K.beat                        touched by node K while it lives; its text says what the node does
        usage-K.jsonl                      what the processes of node K used, a line every few seconds
        secrets-K.json                     Slurm: what node K reads when it starts, and removes (mode 0600)
        stop                               Slurm: what asks all nodes to end, by being there
        logs/node-K.log                    what the launcher of node K printed
        logs/workerlog.R, serverlog.R ...  what rank R printed; logs/events.*.jsonl its run events
        logs/node-K/                       files of the launcher of node K, those of its ranks linked from logs/;
                                           rank 0 leaves plan.json and shape.json there
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Return the folder of all state: PHALANX_HOME, or `phalanx` in the user's data folder."""
    if chosen := os.environ.get("PHALANX_HOME"):
        return Path(chosen)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "phalanx"


def job_folder(root: Path, job: str) -> Path:
    """Return the folder of a job under the home `root`."""
    return root / "jobs" / job


def attempt_folder(root: Path, job: str, attempt: int) -> Path:
    """Return the folder of one attempt under the home `root`."""
    return job_folder(root, job) / f"attempt-{attempt}"


def logs(folder: Path) -> Path:
    """Return the folder of an attempt's log files."""
    return folder / "logs"


def secrets(folder: Path, node: int) -> Path:
    """Return the file from which node `node` takes the secrets, which it removes."""
    return folder / f"secrets-{node}.json"


def stop(folder: Path) -> Path:
    """Return the file that asks all nodes of an attempt to end."""
    return folder / "stop"


def checkpoints(job_folder: Path, chosen: str | None) -> Path:
    """Return the folder that the attempts of a job share: `checkpoint.dir` of its spec, or one in the job's folder."""
    return job_folder / (chosen or "checkpoints")


def launcher_logs(folder: Path, node: int) -> Path:
    """Return the folder of the files of node `node`'s launcher."""
    return logs(folder) / f"node-{node}"


def exit_record(folder: Path, node: int) -> Path:
    """Return the exit record of node `node`."""
    return folder / f"node-{node}.json"


def heartbeat(folder: Path, node: int) -> Path:
    """Return the heartbeat of node `node`: a file whose time of change shows that it lives."""
    return folder / f"node-{node}.beat"


def usage(folder: Path, node: int) -> Path:
    """Return the file with what the processes of node `node` use."""
    return folder / f"usage-{node}.jsonl"
