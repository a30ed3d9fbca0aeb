"""`phalanx verify`: the first difference of two runs is named, with its cause; equal runs are called equal."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import wrong_numbers_rank
from benchmarks.wrong_numbers import VERIFY, WrongNumber
from benchmarks.wrong_numbers_rank import Job
from launching import BIN
from phalanx.diagnose.verify.compare import compare_runs
from phalanx.diagnose.verify.records import RecordedRun, read_run
from phalanx.diagnose.verify.verdict import RunVerdict
from phalanx.parallel.model_shape import shape_of
from phalanx.parallel.observe.recorder import RecordRequest, record_steps
from phalanx.plan.files import save_plan
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.strategy import DistributedStrategy
from ranks import run_ranks

pytestmark = pytest.mark.dist

STEPS = 4


def train_recorded(folder: str, fault: str, engine: str, perturb: bool = False) -> None:
    record_steps(RecordRequest(folder, STEPS, perturb).to_text())
    with contextlib.suppress(SystemExit):
        Job(fault, engine).run(STEPS + 1)


def record(folder: Path, fault: str, engine: str, ranks: int, *, perturb: bool = False, **env: str) -> RecordedRun:
    run_ranks(train_recorded, ranks, str(folder), fault, engine, perturb, env=env)
    return read_run(f"{ranks} ranks", folder, ranks)


References = Callable[[str, str], tuple[RecordedRun, RecordedRun]]

OF_ONE_RANK_TOO = ("seed from clock", "shuffled by world", "batch norm", "dropout", "unseeded augmentation")
"""Faults that change what one rank computes, too. With any of the others one rank trains as with none."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Returns the run of one rank with a fault by an engine, and its control; recorded once where faults share them."""

    @functools.cache
    def recorded(fault: str, engine: str) -> tuple[RecordedRun, RecordedRun]:
        folder = tmp_path_factory.mktemp("references")
        alone = record(folder / "1", fault, engine, 1)
        return alone, record(folder / "control", fault, engine, 1, perturb=True)

    return lambda fault, engine: recorded(fault if fault in OF_ONE_RANK_TOO else "", engine)


def verify(folder: Path, references: References, fault: str, engine: str, ranks: int = 2) -> RunVerdict:
    alone, control = references(fault, engine)
    return compare_runs(alone, record(folder, fault, engine, ranks), control)


def verify_replicas(folder: Path, fault: str) -> RunVerdict:
    one, two = (record(folder / str(ranks), fault, "px", ranks, PHALANX_REPLICAS="4") for ranks in (1, 2))
    return compare_runs(one, two, None)


@pytest.mark.parametrize("fault", VERIFY, ids=lambda fault: f"{fault.name}, {fault.engine}")
def test_a_wrong_number_is_named_with_its_cause(fault: WrongNumber, references: References, tmp_path: Path) -> None:
    difference = verify(tmp_path, references, fault.name, fault.engine).difference
    assert difference is not None
    assert (difference.cause, difference.step) == (fault.cause, fault.step), difference
    assert difference.tensor == fault.tensor or not fault.tensor
    assert fault.ranks is None or difference.ranks == fault.ranks


@pytest.mark.parametrize("engine", ["loop", "ddp", "px"])
def test_runs_that_differ_by_rounding_only_are_equal(engine: str, references: References, tmp_path: Path) -> None:
    verdict = verify(tmp_path, references, "", engine, ranks=3 if engine == "px" else 2)
    assert verdict.is_equal, verdict.text()
    assert verdict.steps == STEPS
    assert 0 < verdict.largest < verdict.tolerance < 1e-3
    assert not verdict.same_bits


def test_replicas_have_the_same_bits_with_dropout_and_augmentation(tmp_path: Path) -> None:
    verdict = verify_replicas(tmp_path, "dropout")
    assert (verdict.is_equal, verdict.is_exact, verdict.same_bits) == (True, True, True), verdict.text()


def test_a_flipped_bit_of_a_replica_shows_where_bits_must_agree(tmp_path: Path) -> None:
    difference = verify_replicas(tmp_path, "flipped bit of a replica").difference
    assert difference is not None
    assert (difference.step, difference.kind, difference.tensor) == (2, "gradient", "second.weight"), difference


def test_a_script_without_a_seed_is_no_equal_run(tmp_path: Path) -> None:
    alone = record(tmp_path / "1", "seed from clock", "loop", 1)
    again = record(tmp_path / "2", "seed from clock", "loop", 1, perturb=True)
    verdict = compare_runs(alone, alone, again)
    assert verdict.difference is not None
    assert verdict.difference.cause == "seed"


def test_the_command_compares_a_script_with_a_commit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = Path(wrong_numbers_rank.__file__).read_text()
    script.write_text(text.replace("lr = 0.1\n", "lr = 0.3\n", 1))
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "train.py"), ("commit", "-qm", "before")):
        subprocess.run([*git, *command], check=True)
    script.write_text(text)
    arguments = ("verify", "-n", "1", "--steps", "2", "--no-control", "--json", "--against", "HEAD", "train.py")
    done = subprocess.run(
        [BIN / "phalanx", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stderr
    difference = json.loads(done.stdout)["difference"]
    assert (difference["cause"], difference["step"]) == ("optimizer settings", 0)
    assert "lr is 0.3 in the one run and 0.1 in the other" in difference["explanation"]
    trees = subprocess.run([*git, "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(trees.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--against", "nothing", "train.py"), "git rev-parse failed"),
        (("--plan", "train.py", "--against", "HEAD", "train.py"), "not both"),
        (("--keep", ".", "train.py"), "is not empty"),
        (("missing.py",), "does not exist"),
        (("-n", "1", "--no-control", "train.py"), "failed with exit code 1 after 0 steps"),
    ],
)
def test_what_cannot_be_compared_is_said(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise RuntimeError('broken script')\n")
    done = subprocess.run(
        [BIN / "phalanx", "verify", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (1, 2)
    assert message in done.stderr


def test_a_plan_from_outside_the_script_is_applied_and_compared(tmp_path: Path) -> None:
    sharding = DistributedStrategy(sharding=True, sharding_configs={"stage": 3})
    save_plan(plan_from_strategy(sharding, shape_of(Job("", "px").net), 2, 0), tmp_path / "plan.json")
    alone = record(tmp_path / "1", "", "px", 1)
    planned = record(tmp_path / "2", "", "px", 2, PHALANX_PLAN=str(tmp_path / "plan.json"))
    assert planned.steps[0][0].meta["local"] == []  # torch reduces what it shards without hooks of parameters
    verdict = compare_runs(alone, planned)
    assert verdict.is_equal, verdict.text()
