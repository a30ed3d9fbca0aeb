"""What Slurm's words mean, the batch script, and what is made of a Slurm that does not answer."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import BackendError, SpecError
from phalanx.jobs import paths
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt.files import ExitRecord
from phalanx.jobs.backend import Phase, Submission
from phalanx.jobs.backends.slurm import backend
from phalanx.jobs.backends.slurm.backend import Slurm
from phalanx.jobs.backends.slurm.states import SinfoRow, hosts, read_nodes, why_waiting
from phalanx.jobs.models import Cause
from phalanx.jobs.spec.training_job import TrainingJob


class Commands:
    """Slurm's commands, played: what each says, or the error it ends with; and what was called."""

    def __init__(self, **said: str | BackendError) -> None:
        self.said = said
        self.called: list[tuple[str, ...]] = []

    def __call__(self, command: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
        self.called.append((command, *arguments))
        self.environment = environment
        said = self.said.get(command, "")
        if isinstance(said, BackendError):
            raise said
        return said


def made(tmp_path: Path, **said: Any) -> Submission:
    spec = {"name": "j", "command": "python train.py", "backend": "slurm", "resources": {"nodes": 2}, **said}
    folder = tmp_path / "jobs" / "j-ab" / "attempt-1"
    return Submission("j-ab", 1, TrainingJob.model_validate(spec), folder, {"TOKEN": "hush"})


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands(sbatch="17\n")
    monkeypatch.setattr(backend, "_call", commands)
    return commands


def test_the_script_says_what_is_asked_for_and_no_secret(tmp_path: Path) -> None:
    said = {
        "resources": {"nodes": 2, "cpu": 2.5, "memory": "3Gi", "gpu": 4},
        "max_runtime": "2h",
        "slurm": {"partition": "long", "account": "lab", "options": ["--constraint=a100"]},
    }
    script = Slurm().render(made(tmp_path, **said))
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=j-ab.1",
        '--comment="phalanx job j-ab, attempt 1"',
        "--nodes=2",
        "--ntasks-per-node=1",
        "--no-requeue",
        f"--output={tmp_path}/jobs/j-ab/attempt-1/logs/slurm.log",
        "--open-mode=append",
        *("--cpus-per-task=3", "--mem=3072M", "--gpus-per-node=4", "--time=122"),
        *("--partition=long", "--account=lab", "--constraint=a100"),
    ]
    assert "hush" not in script


def test_nodes_have_room_for_the_servers_that_are_dealt_to_them(tmp_path: Path) -> None:
    said = {"resources": {"nodes": 2, "cpu": 2, "memory": "1Gi"}, "servers": {"count": 3, "cpu": 1.5, "memory": "1Gi"}}
    script = Slurm().render(made(tmp_path, **said))
    assert "--cpus-per-task=5\n" in script
    assert "--mem=3072M\n" in script


def test_secrets_are_handed_over_in_files_that_only_their_owner_reads(
    tmp_path: Path, played: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_SECRET_KEY", "key")
    asked = made(tmp_path)
    assert Slurm().submit(asked) == "17"
    values = []
    for node in range(2):
        path = paths.secrets(asked.folder, node)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        values.append(json.loads(path.read_text()))
    assert values[0] == values[1]
    assert values[0]["TOKEN"] == "hush"
    assert len(values[0]["PHALANX_JOB_SECRET"]) == 64
    assert played.environment is not None
    assert "PHALANX_SECRET_KEY" not in played.environment
    assert not any("hush" in word for call in played.called for word in call)


def test_a_submission_that_was_not_seen_to_succeed_is_found_by_its_name(tmp_path: Path, played: Commands) -> None:
    asked = made(tmp_path)
    played.said["sbatch"] = BackendError("sbatch did not answer")
    with pytest.raises(BackendError, match="did not answer"):
        Slurm().submit(asked)
    played.said["squeue"] = "j-ab.1|17|PENDING|Priority|\nj-ab.11|18|RUNNING|None|n1\n"
    assert Slurm().submit(asked) == "17"
    assert [call[0] for call in played.called].count("sbatch") == 1


def test_a_job_that_slurm_forgot_ended_as_its_nodes_wrote(tmp_path: Path, played: Commands) -> None:
    asked = made(tmp_path)
    attempt_files.write_spec(asked)
    assert Slurm().status(asked, "17").phase is Phase.GONE
    attempt_files.write_exit_record(asked.folder, 0, ExitRecord("succeeded"))
    assert Slurm().status(asked, "17").phase is Phase.GONE
    attempt_files.write_exit_record(asked.folder, 1, ExitRecord("succeeded"))
    assert Slurm().status(asked, "17").phase is Phase.SUCCEEDED
    attempt_files.write_exit_record(asked.folder, 1, ExitRecord("failed", Cause.USER_CODE))
    assert Slurm().status(asked, "17").phase is Phase.FAILED


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("NODE_FAIL", Cause.NODE_FAILURE),
        ("PREEMPTED", Cause.PREEMPTED),
        ("OUT_OF_MEMORY", Cause.OOM),
        ("TIMEOUT", Cause.TIMEOUT),
    ],
)
def test_a_state_of_slurm_is_a_cause(tmp_path: Path, played: Commands, state: str, cause: Cause) -> None:
    played.said["squeue"] = f"j-ab.1|17|{state}|None|n[1-2]\n"
    status = Slurm().status(made(tmp_path), "17")
    assert (status.phase, status.nodes) == (Phase.FAILED, ("n1", "n2"))
    assert status.failure is not None
    assert status.failure.cause is cause


def test_a_job_none_of_whose_nodes_started_failed_in_its_set_up(tmp_path: Path, played: Commands) -> None:
    asked = made(tmp_path)
    attempt_files.write_spec(asked)
    (paths.logs(asked.folder) / "slurm.log").write_text("bash: python: no such file\n")
    played.said["squeue"] = "j-ab.1|17|FAILED|NonZeroExitCode|n1\n"
    failure = Slurm().status(asked, "17").failure
    assert failure is not None
    assert (failure.cause, failure.detail) == (Cause.SETUP, "bash: python: no such file")
    attempt_files.write_heartbeat(asked.folder, 0, "running")
    assert Slurm().status(asked, "17").failure is None


def test_of_two_jobs_of_one_attempt_the_one_that_started_is_looked_at(tmp_path: Path, played: Commands) -> None:
    asked = made(tmp_path)
    attempt_files.write_spec(asked)
    played.said["squeue"] = "j-ab.1|18|COMPLETED|None|n1\nj-ab.1|17|RUNNING|None|n1\n"
    (asked.folder / "slurm.id").write_text("17\n")
    attempt_files.write_heartbeat(asked.folder, 0, "running")
    assert Slurm().status(asked, "18").phase is Phase.RUNNING


def test_a_job_that_completed_without_a_node_did_not_succeed(tmp_path: Path, played: Commands) -> None:
    asked = made(tmp_path)
    attempt_files.write_spec(asked)
    played.said["squeue"] = "j-ab.1|17|COMPLETED|None|n1\n"
    status = Slurm().status(asked, "17")
    assert (status.phase, status.failure and status.failure.cause) == (Phase.FAILED, Cause.SETUP)


def test_all_jobs_of_a_turn_share_one_question(tmp_path: Path, played: Commands) -> None:
    played.said["squeue"] = "j-ab.1|17|PENDING|Resources|\n"
    slurm = Slurm()
    for _ in range(50):
        slurm.status(made(tmp_path), "17")
    assert len(played.called) == 1


def test_who_does_not_end_in_time_is_cancelled(
    tmp_path: Path, played: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = made(tmp_path)
    attempt_files.write_spec(asked)
    played.said["squeue"] = "j-ab.1|17|RUNNING|None|n1\n"
    slurm = Slurm()
    slurm.stop(asked, "17", 30.0)
    assert paths.stop(asked.folder).exists()
    assert not [call for call in played.called if call[0] == "scancel"]
    now = paths.stop(asked.folder).stat().st_mtime
    monkeypatch.setattr(backend.time, "time", lambda: now + 91)
    slurm.stop(asked, "17", 30.0)
    assert [call for call in played.called if call[0] == "scancel"] == [("scancel", "--quiet", "17")]


def test_reasons_are_told_in_words_and_in_slurms_own() -> None:
    assert why_waiting("Resources") == "waits until enough nodes are free (Slurm: Resources)"
    assert why_waiting("QOSMaxJobsPerUserLimit").startswith("a limit of its user, account or QOS is reached")
    assert why_waiting("ReqNodeNotAvail, UnavailableNodes:n1").startswith("a node that it needs is down")
    assert why_waiting("SomethingNew") == "waits (Slurm: SomethingNew)"


def test_nodes_are_read_as_sinfo_lists_them() -> None:
    rows = read_nodes("debug*|n1|4|3900|(null)|infinite\ngpu|n2|64|512000|gpu:a100:8(S:0-1),nic:2|1-00:00:00\n")
    assert rows == [SinfoRow("debug", True, "n1", 4, 3900, 0), SinfoRow("gpu", False, "n2", 64, 512000, 8)]
    assert hosts("n[1-2],m3") == ["n1", "n2", "m3"]
    assert hosts("") == hosts("(null)") == []


def test_without_slurm_here_a_spec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SpecError, match="backend: slurm cannot be used here"):
        Slurm().check(TrainingJob.model_validate({"name": "j", "command": "python t.py", "backend": "slurm"}))
