"""`Slurm`: the Slurm backend: one sbatch job per attempt, one task per node.

Its commands sbatch, squeue, scancel and sinfo are used, and no accounting: how an attempt ended its nodes write.
The attempt's folder lies where every node sees it.
"""

from __future__ import annotations

import json
import math
import os
import pwd
import secrets
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import BackendError, SpecError
from phalanx.jobs import paths
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt import launch_command
from phalanx.jobs.backend import Phase, Status, Submission
from phalanx.jobs.backends.slurm import states as slurm_states
from phalanx.jobs.models import Cause, Failure
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.launch.reports.log_tail import last_lines

SNAPSHOT_S = 2.0
"""How long the output of squeue is reused: one call serves all jobs of a step of the controller."""

COMMAND_S = 60.0
"""How long a command of Slurm may take; a controller that is down answers after its own limit."""

LATE_S = 60.0
"""How long after its grace a job that was asked to end is cancelled outright."""

_FIRST_PORT = 20000
_PORT_BLOCKS = 250


@dataclass(frozen=True)
class SqueueRow:
    """A job as squeue shows it."""

    id: str
    state: str
    reason: str
    nodes: str


class Slurm:
    """Runs attempts as batch jobs of the Slurm whose commands are on PATH."""

    name = "slurm"

    def __init__(self) -> None:
        """Make the backend; Slurm is asked nothing yet."""
        self._rows: dict[str, list[SqueueRow]] = {}
        self._seen_at = float("-inf")

    def check(self, spec: TrainingJob) -> None:
        """Raise SpecError if no partition could ever run `spec`, or no Slurm is reachable from here."""
        launch_command.check(spec)
        slurm_states.check_said(spec)
        try:
            output = _call("sinfo", "--noheader", "--Node", "--format=%P|%N|%c|%m|%G|%l")
        except BackendError as error:
            raise SpecError(f"backend: slurm cannot be used here. {error}") from None
        slurm_states.check_fits(spec, slurm_states.read_nodes(output))

    def render(self, submission: Submission, *, full: bool = False) -> str:
        """Return the batch script."""
        spec, folder = submission.spec, submission.folder
        options = [
            f"--job-name={_job_name(submission)}",
            f"--comment=phalanx job {submission.job}, attempt {submission.attempt}",
            *_node_options(spec),
            "--ntasks-per-node=1",
            "--no-requeue",
            f"--output={paths.logs(folder)}/slurm.log",
            "--open-mode=append",
            *_resources(spec),
            *spec.slurm.options,
        ]
        values = {
            "options": "\n".join(f"#SBATCH {_quote(option)}" for option in options),
            "no_kill": " --no-kill" if spec.resources.least_nodes is not None else "",
            "folder": shlex.quote(str(folder)),
            "python": shlex.quote(sys.executable),
            "port": f"$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORT_BLOCKS} * {launch_command.PORTS}))",
        }
        return _SCRIPT.format(**values)

    def submit(self, submission: Submission) -> str:
        """Submit the batch script, or find the job if it was submitted before; return its id.

        Raises:
            BackendError: If Slurm refuses, or does not answer.
        """
        if started_id := _started_id(submission.folder):
            return started_id
        if (row := self._current_row(submission)) is not None:
            return row.id
        path = attempt_files.write_spec(submission).with_name("job.sbatch")
        path.write_text(self.render(submission), encoding="utf-8")
        _write_secrets(submission)
        # What opens our store stays here; all else of this environment goes with the job, as with any sbatch.
        own = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
        output = _call("sbatch", "--parsable", str(path), environment=own)
        self._seen_at = float("-inf")
        return output.strip().partition(";")[0]

    def status(self, submission: Submission, handle: str) -> Status:
        """Return where the job is."""
        folder = submission.folder
        row = self._recent_row(submission)
        if row is None:
            return _status_of_forgotten(submission)
        hosts = tuple(slurm_states.hosts(row.nodes))
        if row.state in slurm_states.WAITING:
            return Status(Phase.QUEUED, slurm_states.why_waiting(row.reason))
        if row.state in slurm_states.ALIVE:
            activity = attempt_files.read_activity(folder, 0)
            phase = Phase.RUNNING if activity == "running" else Phase.PREPARING
            return Status(phase, activity or row.state.lower(), hosts)
        if row.state == "COMPLETED" and attempt_files.read_activity(folder, 0):
            return Status(Phase.SUCCEEDED, "", hosts)
        return Status(Phase.FAILED, row.state, hosts, _failure(folder, row))

    def collect(self, submission: Submission, handle: str) -> None:
        """Do nothing: nodes write into the attempt's folder themselves."""

    def stop(self, submission: Submission, handle: str, grace_s: float) -> None:
        """Take a waiting job back; ask the nodes of a running one to end, and cancel it long after its grace.

        A signal of Slurm's would reach every process of the job at once, and the nodes' own would be a second one.
        """
        stop_file = paths.stop(submission.folder)
        if not stop_file.exists():
            stop_file.touch()
        row = self._current_row(submission)
        if row is None:
            return
        is_late = time.time() > stop_file.stat().st_mtime + grace_s + LATE_S
        if row.state in slurm_states.WAITING or (is_late and row.state in slurm_states.ALIVE):
            self._cancel(submission, row.id)

    def cleanup(self, submission: Submission, handle: str) -> None:
        """Cancel what is left of the job, and remove secrets that no node came to read."""
        row = self._current_row(submission)
        if row is not None and row.state in (*slurm_states.WAITING, *slurm_states.ALIVE):
            self._cancel(submission, row.id)
        for node in range(submission.spec.resources.nodes):
            paths.secrets(submission.folder, node).unlink(missing_ok=True)

    def _cancel(self, submission: Submission, number: str) -> None:
        """Cancel a job, which may have ended a moment ago."""
        try:
            _call("scancel", "--quiet", number)
        except BackendError:
            row = self._current_row(submission)
            if row is not None and row.state in (*slurm_states.WAITING, *slurm_states.ALIVE):
                raise

    def _current_row(self, submission: Submission) -> SqueueRow | None:
        """The job as it is now."""
        self._seen_at = float("-inf")
        return self._recent_row(submission)

    def _recent_row(self, submission: Submission) -> SqueueRow | None:
        """The job as it was a moment ago: of several submitted for the attempt, the one that started."""
        rows = self._snapshot().get(_job_name(submission), [])
        started_id = _started_id(submission.folder)
        return next((row for row in rows if row.id == started_id), rows[0] if rows else None)

    def _snapshot(self) -> dict[str, list[SqueueRow]]:
        """This user's jobs by name, as squeue shows them now or showed them a moment ago."""
        if time.monotonic() > self._seen_at + SNAPSHOT_S:
            user = pwd.getpwuid(os.getuid()).pw_name
            output = _call("squeue", "--noheader", "--states=all", f"--user={user}", "--format=%j|%i|%T|%r|%N")
            self._rows = {}
            for name, *rest in (line.split("|") for line in output.splitlines()):
                if len(rest) == 4:
                    self._rows.setdefault(name, []).append(SqueueRow(*rest))
            self._seen_at = time.monotonic()
        return self._rows


_SCRIPT = """#!/bin/bash
{options}

folder={folder}
if [ ! -w "$folder" ]; then
    echo "$(hostname) cannot write to $folder, which all nodes must see" >&2
    exit 1
fi
# One job an attempt: of two that were submitted for it, the first to start is the one.
mkdir "$folder/slurm.lock" || exit 0
echo "$SLURM_JOB_ID" > "$folder/slurm.id"

# Addresses of the nodes in Slurm's order; names need not mean anything to them.
hosts=$(scontrol --oneliner show node "$SLURM_JOB_NODELIST" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p' | paste -sd,)

srun --ntasks-per-node=1 --kill-on-bad-exit=0{no_kill} {python} -m phalanx.jobs.node "$folder" \\
    --node SLURM_NODEID --signals-reach-all --hosts "$hosts" --port "{port}"
"""


def _job_name(submission: Submission) -> str:
    return f"{submission.job}.{submission.attempt}"


def _resources(spec: TrainingJob) -> list[str]:
    resources, options = spec.resources, []
    cpu, memory = slurm_states.needs(spec)
    if cpu is not None:
        options.append(f"--cpus-per-task={math.ceil(cpu)}")
    if memory is not None:
        options.append(f"--mem={math.ceil(memory / 2**20)}M")
    if resources.gpu:
        options.append(f"--gpus-per-node={resources.gpu}")
    if spec.max_runtime is not None:
        # Slurm counts minutes; the nodes end in time themselves.
        options.append(f"--time={int((spec.max_runtime + spec.grace) // 60) + 2}")
    chosen = {"partition": spec.slurm.partition, "account": spec.slurm.account, "qos": spec.slurm.qos}
    return options + [f"--{option}={value}" for option, value in chosen.items() if value]


def _node_options(spec: TrainingJob) -> list[str]:
    """How many nodes; an elastic job begins with fewer, and continues when one fails."""
    resources = spec.resources
    if resources.least_nodes is None:
        return [f"--nodes={resources.nodes}"]
    return [f"--nodes={resources.least_nodes}-{resources.nodes}", "--no-kill"]


def _quote(option: str) -> str:
    """An option as sbatch reads it: quotes around what has spaces."""
    name, equals, value = option.partition("=")
    return f'{name}{equals}"{value}"' if " " in value else option


def _write_secrets(submission: Submission) -> None:
    """Leave every node a file of its own that it alone reads and removes."""
    values = {"PHALANX_JOB_SECRET": secrets.token_hex(32), **submission.secrets}
    for node in range(submission.spec.resources.nodes):
        path = paths.secrets(submission.folder, node)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(values, file)


def _started_id(folder: Path) -> str:
    """The id that a job of this attempt wrote when it started."""
    path = folder / "slurm.id"
    return path.read_text().strip() if path.exists() else ""


def _status_of_forgotten(submission: Submission) -> Status:
    """The status of a job that Slurm forgot, as it does minutes after the end, from its exit records."""
    records = [
        attempt_files.read_exit_record(submission.folder, node) for node in range(submission.spec.resources.nodes)
    ]
    if not all(records):
        return Status(Phase.GONE, "Slurm does not know the job any more")
    return Status(Phase.SUCCEEDED if attempt_files.all_succeeded(records) else Phase.FAILED)


def _failure(folder: Path, row: SqueueRow) -> Failure | None:
    log_tail = "\n".join(last_lines(str(paths.logs(folder) / "slurm.log"), 20))
    known_failure = slurm_states.FAILURES.get(row.state)
    if known_failure is not None:
        cause, message = known_failure
        return Failure(cause, f"{message} (Slurm: {row.state}, nodes {row.nodes})", detail=log_tail)
    if attempt_files.read_activity(folder, 0):
        return None
    return Failure(Cause.SETUP, "no node of the job started; see logs/slurm.log", detail=log_tail)


def _call(command: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run a command of Slurm and return its output.

    Raises:
        BackendError: If it is not there, refuses, or takes too long.
    """
    try:
        process = subprocess.run(
            [command, *arguments], env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except FileNotFoundError:
        raise BackendError(
            f"{command} is not on PATH. Run this on a host that can submit to Slurm, or choose another backend."
        ) from None
    except subprocess.TimeoutExpired:
        raise BackendError(f"{command} did not answer within {COMMAND_S:g} s. Is Slurm's controller up?") from None
    if process.returncode:
        raise BackendError(f"{command} said: {process.stderr.strip() or f'exit code {process.returncode}'}")
    return process.stdout
