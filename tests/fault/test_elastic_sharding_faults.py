"""Ranks of `phalanx run -n a:b` are killed while they shard optimizer state, with a mirror and without."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.elastic_jobs import Trained, run_job
from benchmarks.soak.elastic import PATIENCE

pytestmark = pytest.mark.fault

SCRIPT = ("--epochs", 8, "--samples", 240, "--pause", 0.003)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The same training without faults, which shards nothing."""
    job = run_job(tmp_path_factory.mktemp("undisturbed") / "job", ranks="1:2", script=SCRIPT)
    assert job.code == 0, job.report()
    assert (job.updates, len(job.hashes)) == (80, 1)
    return job


def kill(update: int, point: str, rank: int | None = None) -> dict[str, Any]:
    """Return the order to kill a rank, of at least 3."""
    return {"update": update, "rank": rank, "point": point, "signal": int(signal.SIGKILL), "ranks": 3, "delay": 0.0}


def test_killed_ranks_cost_neither_samples_nor_bits_with_a_mirror(undisturbed: Trained, tmp_path: Path) -> None:
    faults = [kill(4, "backward", 1), kill(16, "share", 0), kill(28, "optimizer", 2), kill(40, "resharded")]
    script = (*SCRIPT, "--sharding", "--mirror", 1)
    flags = ("--max-restarts", "100")
    job = run_job(tmp_path / "job", faults=faults, launcher=flags, script=script, env=PATIENCE)
    assert not job.problems(undisturbed), job.report()
    assert (tmp_path / "job" / "fault.1").exists(), job.report()
    assert "Restarting the whole job" not in job.output


def test_a_job_without_a_mirror_starts_again_from_its_newest_checkpoint(undisturbed: Trained, tmp_path: Path) -> None:
    script = (*SCRIPT, "--sharding", "--save-every", 5, "--resume")
    faults, flags = [kill(18, "backward", 1)], ("--max-restarts", "3")
    job = run_job(tmp_path / "job", ranks="1:3", faults=faults, launcher=flags, script=script, env=PATIENCE)
    assert job.code == 0, job.report()
    assert job.hashes == undisturbed.hashes
    assert "Restarting the whole job" in job.output
    assert "had no mirror (mirror=1)" in job.output
    paths = (tmp_path / "job" / "log").rglob("events.launcher.0.jsonl")
    events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    ended = [event for event in events if event.get("ended")]
    assert [event["lost"] for event in ended] == [["n0.1"]]
    assert "newest checkpoint" in ended[0]["ended"]
    assert not job.remaining
