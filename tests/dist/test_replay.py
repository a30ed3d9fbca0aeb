"""`phalanx replay`: a step of a run is done again from its flight log, and a rank that computed other bits is named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import wrong_numbers_rank
from launching import BIN, launch_warm
from phalanx.diagnose.replay import commands
from phalanx.diagnose.replay.flight import Flight
from phalanx.errors import ConfigError, LaunchError
from phalanx.parallel.observe.flight_log import MOST_BYTES, FlightLog, compressed, flight_file, read_flight_log

pytestmark = pytest.mark.dist

SCRIPT = wrong_numbers_rank.__file__


def fly(folder: Path, fault: str, *arguments: str, ranks: int = 2) -> None:
    job = launch_warm(
        folder,
        *("-n", str(ranks), "--replicas", "2", "--flight-log"),
        *(SCRIPT, "--engine", "px", "--fault", fault, "--steps", "6", *arguments),
    )
    assert job.code == 0, job.out + job.err


def replay(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(commands.command, [*arguments, "--json", str(folder / "log")])
    assert done.stdout, done.exception
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a fault, with its checkpoints in `saved`."""
    folder = tmp_path_factory.mktemp("clean")
    fly(folder, "", "--folder", str(folder / "saved"))
    return folder


def test_a_run_agrees_with_its_replay_from_the_nearest_checkpoint(clean: Path) -> None:
    before = sorted(path.name for path in (clean / "saved").iterdir())
    code, report = replay(clean, "--step", "4")
    assert (code, report["equal"], report["from_step"]) == (0, True, 4), report
    assert report["checkpoint"].endswith("step-4")
    assert sorted(path.name for path in (clean / "saved").iterdir()) == before


def test_a_flipped_bit_names_step_replica_rank_and_bucket(tmp_path: Path) -> None:
    fly(tmp_path, "flipped bit of a replica")
    code, report = replay(tmp_path, "--find", "first-difference")
    mismatch = report["mismatch"]
    assert (code, mismatch["step"], mismatch["replica"], mismatch["rank"]) == (1, 2, 1, 1), report
    assert mismatch["bucket"], report


MODEL = """
import torch, torch.nn.functional as F
import phalanx as px
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(24, 5))
data = torch.utils.data.TensorDataset(torch.randn(96, 12), torch.randint(0, 5, (96,)))
model = px.Model(net, F.cross_entropy, torch.optim.Adam(net.parameters()))
model.train(2, data, batch_size=8, callbacks=[px.ModelCheckpoint("saved", every_steps=4)])
"""


def test_a_model_is_replayed_from_a_checkpoint_of_its_callback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL)
    job = launch_warm(tmp_path, "-n", "2", "--replicas", "2", "--flight-log", "train.py")
    assert job.code == 0, job.out + job.err
    code, report = replay(tmp_path, "--step", "6")
    assert (code, report["equal"], report["from_step"]) == (0, True, 4), report


LOOP = """
import os
import torch, torch.nn.functional as F
import phalanx as px
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 5))
data = torch.utils.data.TensorDataset(torch.randn(96, 12), torch.randint(0, 5, (96,)))
model, optimizer, loader = px.distribute(net, torch.optim.SGD(net.parameters(), 0.1), data, global_batch=16)
if os.path.isdir("saved"):
    px.load("saved", model, optimizer, loader)
for number, (x, y) in enumerate(loader, 1):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if number % 2 == 0:
        px.save("saved", model, optimizer, loader)
"""


def test_checkpoints_that_are_numbered_by_themselves_are_known_by_their_updates(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    job = launch_warm(tmp_path, "-n", "2", "--replicas", "2", "--flight-log", "train.py")
    assert job.code == 0, job.out + job.err
    code, report = replay(tmp_path, "--step", "5")
    assert (code, report["equal"], report["from_step"]) == (0, True, 4), report


def test_a_replay_that_takes_too_long_is_ended_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    entries = [
        {"kind": "begin", "script": ["train.py"], "folder": str(tmp_path)},
        {"kind": "step", "step": 0, "loss": [1.0], "local": {}, "sum": []},
    ]
    write_log(tmp_path, entries)
    done = subprocess.run(
        [BIN / "phalanx", "replay", "--step", "0", "--timeout", "1", "log"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1
    assert "the replay did not end within 1 s. Give a longer --timeout." in done.stderr
    assert "Traceback" not in done.stderr


def write_log(folder: Path, entries: list[dict[str, Any]]) -> None:
    (folder / "log").mkdir()
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (folder / "log" / "flight.0.jsonl").write_text(lines)


def test_a_replay_that_did_not_come_to_the_step_does_not_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = {n: {0: {"loss": [1.0], "local": {}, "sum": []}} for n in range(6)}
    flight = Flight(["train.py"], str(tmp_path), replicas=2, updates=updates)
    again = Flight(["train.py"], str(tmp_path), replicas=2, updates={0: updates[0]})
    monkeypatch.setattr(commands, "read_flight", lambda _: flight)
    monkeypatch.setattr(commands, "_replay", lambda *_, **__: (again, ""))
    with pytest.raises(LaunchError, match="did not come to step 5: it made steps"):
        commands.command.main(["--step", "5", str(tmp_path)], standalone_mode=False)


def test_a_first_difference_needs_logical_replicas(tmp_path: Path) -> None:
    flight = Flight(["train.py"], str(tmp_path), updates={0: {0: {"loss": [1.0]}}})
    with pytest.raises(ConfigError, match="no logical replicas"):
        commands._target(flight, None, "first-difference")


def test_a_nan_is_found_and_its_sample_named(tmp_path: Path) -> None:
    fly(tmp_path, "inf in one sample")
    _, report = replay(tmp_path, "--find", "nan")
    assert report["step"] == 1
    assert "for sample 37 of the dataset" in report["error"]


def test_a_log_takes_a_few_hundred_bytes_a_step_and_is_bounded(clean: Path, tmp_path: Path) -> None:
    entries = [entry for entry in read_flight_log(flight_file(clean / "log", 1)) if entry["kind"] == "step"]
    assert [entry["step"] for entry in entries] == list(range(6))
    assert all(len(json.dumps(entry)) < 400 for entry in entries)
    log = FlightLog()
    log._path = tmp_path / "flight.7.jsonl"
    log.write({"kind": "begin", "script": ["train.py"]})
    for step in range(3 * MOST_BYTES // 1000):
        log.write({"kind": "step", "step": step, "text": "x" * 1000})
    assert json.loads(log._path.read_text().splitlines()[0]) == {"kind": "begin", "script": ["train.py"]}
    assert sum(path.stat().st_size for path in tmp_path.glob("flight.7.*")) <= 2 * MOST_BYTES


def test_a_spike_and_a_nan_are_found_in_the_losses() -> None:
    losses = [2.0, 1.9, 1.95, 1.8, 1.85, 1.8, 1.75, 9.0, 1.7, float("nan"), 1.0]
    updates = {step: {0: {"loss": [str(loss)]}} for step, loss in enumerate(losses)}
    flight = Flight([], "", updates=updates)
    assert (flight.find_spike(), flight.find_nan()) == (7, 9)


def test_ids_of_a_range_are_written_as_one() -> None:
    assert compressed(range(10, 30, 2)) == "10:29:2"
    assert compressed([5, 4, 3]) == "5:2:-1"
    assert compressed([1, 5, 2]) == [1, 5, 2]
