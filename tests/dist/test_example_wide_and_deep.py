"""The wide & deep example: one file for one process and for servers and workers in every mode, on real flights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.wide_and_deep.flights import open_flights
from phalanx.data.ctr.synthetic import SyntheticClicks

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).parents[2] / "examples" / "wide_and_deep" / "train.py"
PASS_LINE = re.compile(r"^TRAIN ---> pass: (\d+) loss: (\d+\.\d+)$", re.MULTILINE)
SHORT = ("--epochs", "1", "--steps", "60")
MADE_UP = ("--data", "synthetic", "--rows", "8000", "--global-batch", "128", "--epochs", "1")


def alone(*arguments: str) -> dict:
    # One thread, as each of several workers has.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))


def shared(folder: Path, *arguments: str) -> tuple[dict, list[str]]:
    command = [sys.executable, "-m", "phalanx.launch", "--server_num", "1", "--worker_num", "2"]
    command += ["--log_dir", str(folder / "log"), str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(folder / "log" / f"workerlog.{worker}").read_text() for worker in range(2)]
    result = re.search(r"^RESULT (.*)$", logs[0], re.MULTILINE)
    assert result is not None, logs[0]
    return json.loads(result[1]), logs


@pytest.fixture(scope="module")
def one_process() -> dict:
    return alone(*SHORT)


def test_the_rows_are_those_of_the_table():
    flights = open_flights("time")
    train, test = flights.train, flights.test
    assert len(train[2]) + len(test[2]) == 327_346
    assert 0.23 < float(train[2].mean()) < 0.25
    assert train[1].shape[1] == test[1].shape[1]
    assert train[0].isfinite().all()
    assert train[0].abs().max() < 6


def test_some_steps_beat_chance_by_far(one_process):
    assert one_process["auc"] > 0.58
    assert (one_process["world_size"], one_process["servers"]) == (1, 0)


def test_two_workers_in_sync_mode_train_what_one_process_trains(one_process, tmp_path):
    result, logs = shared(tmp_path, "--mode", "sync", *SHORT)
    assert result["auc"] == pytest.approx(one_process["auc"], abs=1e-3)
    assert result["loss"] == pytest.approx(one_process["loss"], abs=1e-4)
    for log in logs:
        assert [found[0] for found in PASS_LINE.findall(log)] == ["0"]


@pytest.mark.parametrize("mode", ["async", "half_async", "geo", "hybrid"])
def test_every_mode_learns(tmp_path, mode):
    result, logs = shared(tmp_path, "--mode", mode, *MADE_UP)
    assert result["auc"] > 0.6
    assert (result["mode"], result["world_size"], result["servers"]) == (mode, 2, 1)
    assert all(PASS_LINE.search(log) for log in logs)


@pytest.fixture(scope="module")
def whole_runs() -> dict:
    splits = ("time", "random")
    with ThreadPoolExecutor() as both:  # at the same time: neither has a use for a second core
        results = both.map(lambda split: alone("--split", split), splits)
        return {split: result["auc"] for split, result in zip(splits, results, strict=True)}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_whole_runs_beat_logistic_regression(whole_runs):
    assert whole_runs["time"] > 0.611 + 0.015
    assert whole_runs["random"] > 0.692 + 0.03


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("mode", "within"), [("sync", 0.001), ("async", 0.01), ("geo", 0.01)])
def test_whole_runs_on_servers_reach_what_one_process_reaches(whole_runs, tmp_path, mode, within):
    result, _ = shared(tmp_path, "--mode", mode, "--split", "time")
    assert result["auc"] == pytest.approx(whole_runs["time"], abs=within)


def test_files_in_criteos_format_are_split_over_the_workers(tmp_path):
    rows = SyntheticClicks(900).make(0, 900)
    (tmp_path / "data").mkdir()
    for part in range(3):
        with (tmp_path / "data" / f"part-{part}").open("w") as file:
            for row in range(part * 300, part * 300 + 300 - 50 * part):
                dense = (str(round(float(value) * 10)) for value in rows.dense[row])
                slots = (f"{value & 0xFFFFFFFF:08x}" for value in rows.ids[row].tolist())
                file.write("\t".join([str(int(rows.label[row])), *dense, *slots]) + "\n")
    options = ("--data", str(tmp_path / "data"), "--hash-space", "1000001", "--mode", "sync", "--global-batch", "64")
    result, _ = shared(tmp_path, *options)
    assert 0.3 < result["auc"] < 0.9
