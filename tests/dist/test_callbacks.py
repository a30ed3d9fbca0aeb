"""Callbacks on several ranks: one result, one place to stop, and one error that names what failed."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim.lr_scheduler import StepLR

import phalanx as px
from phalanx.train.callbacks.run import Run
from ranks import run_ranks
from small_runs import data, train

pytestmark = pytest.mark.dist


class At(px.Callback):
    """Does something on one rank at the end of a step, or of the epoch that ends with it."""

    def __init__(self, rank: int, step: int, act: Any, *, epoch_end: bool = False) -> None:
        self._place, self._act, self._epoch_end = (rank, step), act, epoch_end

    def on_step_end(self, run: Run) -> None:
        if not self._epoch_end and self._place == (run.rank, run.step):
            self._act(run)

    def on_epoch_end(self, run: Run) -> None:
        if self._epoch_end and self._place == (run.rank, run.step):
            self._act(run)


def _evaluated(model: nn.Module) -> dict[str, float]:
    return px.evaluate(model, data(), {"loss": lambda out, target: (out - target).square()}, batch_size=4)


def _trained(folder: str) -> dict[str, Any]:
    """Train with every callback at once."""
    rank = px.init().rank
    printed = io.StringIO()
    schedule = px.LearningRateSchedule(lambda optimizer: StepLR(optimizer, step_size=5, gamma=0.5))
    average = px.EMACallback(0.5)
    callbacks = [
        px.LossMonitor(), px.TimeMonitor(), px.ProgressBar(), schedule, average, px.EarlyStopping("loss", patience=9),
        px.JSONLogger(f"{folder}/run.jsonl", every_steps=2), px.CSVLogger(f"{folder}/run.csv"),
        px.TensorBoard(f"{folder}/curves"), px.ModelCheckpoint(f"{folder}/kept", best="loss"),
    ]  # fmt: skip
    with contextlib.redirect_stdout(printed):
        run, model = train(callbacks, epochs=3, evaluate=_evaluated)
    return {
        "rank": rank,
        "lines": [line for line in printed.getvalue().splitlines() if line.startswith("global_step")],
        "printed": bool(printed.getvalue()),
        "lr": run.optimizer.param_groups[0]["lr"],
        "samples": run.samples,
        "weight": model.state_dict()["weight"].flatten().tolist(),
        "average": average.ema.state_dict()["shadow"]["weight"].flatten().tolist(),
        "loss": run.metrics["loss"],
    }


def _resumed(folder: str) -> tuple[int, int, float]:
    px.init()
    stopper = px.EarlyStopping("loss", patience=9)
    saver = px.ModelCheckpoint(f"{folder}/kept", best="loss")
    more = [px.EMACallback(0.5), px.LearningRateSchedule(lambda optimizer: StepLR(optimizer, step_size=5, gamma=0.5))]
    run, _ = train([stopper, saver, *more], epochs=4, evaluate=_evaluated, resume=f"{folder}/kept")
    return run.step, run.samples, run.optimizer.param_groups[0]["lr"]


def test_n_ranks_do_what_one_does(tmp_path: Path) -> None:
    alone = _trained(str(tmp_path / "1"))
    found = run_ranks(_trained, 2, str(tmp_path / "2"))
    assert [(one["printed"], len(one["lines"])) for one in found] == [(True, 3), (False, 0)]
    assert found[0]["lines"] == alone["lines"]
    for one in found:
        assert (one["lr"], one["samples"]) == (alone["lr"], alone["samples"]) == (0.1 * 0.25, 69)
        assert one["weight"] == pytest.approx(alone["weight"], rel=1e-5, abs=1e-7)
        assert one["average"] == pytest.approx(alone["average"], rel=1e-5, abs=1e-7)
        assert one["loss"] == pytest.approx(alone["loss"], rel=1e-5, abs=1e-7)
    assert {path.name for path in (tmp_path / "2").iterdir()} == {"run.jsonl", "run.csv", "curves", "kept"}
    assert len((tmp_path / "2" / "run.jsonl").read_text().splitlines()) == 6 + 3
    assert len(list((tmp_path / "2" / "curves").iterdir())) == 1
    # At another number of ranks, the schedule and the counts continue.
    assert set(run_ranks(_resumed, 3, str(tmp_path / "2"))) == {(16, 92, 0.1 * 0.125)}


def _stopped(how: str) -> tuple[int, int, str | None]:
    px.init()
    callbacks: list[px.Callback] = {
        "all": lambda: [At(rank, 6, lambda run: run.stop("enough")) for rank in range(3)],
        "all, at an epoch's end": lambda: [
            At(rank, 8, lambda run: run.stop("enough"), epoch_end=True) for rank in range(3)
        ],
        "one": lambda: [At(1, 6, lambda run: run.stop("rank 1 has seen enough"))],
    }[how]()
    run, _ = train(callbacks, epochs=500)
    return run.step, run.samples, run.stop_reason


def _stopped_in_each_way() -> list[tuple[int, int, str | None]]:
    return [_stopped(how) for how in ("all", "all, at an epoch's end", "one")]


def test_ranks_stop_at_one_step() -> None:
    first, *others = run_ranks(_stopped_in_each_way, 3)
    assert others == [first, first]
    assert first[:2] == [(6, 35, "enough"), (8, 46, "enough")]
    step, _, reason = first[2]
    assert 6 <= step < 500
    assert reason == "rank 1 has seen enough"


def _failing(place: str) -> None:
    def fail(_: Run) -> None:
        raise KeyError("missing")

    px.init()
    train([px.LossMonitor(), At(1, 4, fail, epoch_end=place == "epoch end")], epochs=1 if place == "last" else 500)


@pytest.mark.parametrize("place", ["step", "epoch end", "last"])
def test_a_callback_that_fails_on_one_rank_ends_all_with_its_name(place: str) -> None:
    other, failed = run_ranks(_failing, 2, place, expect_failure=True)
    method = "on_epoch_end" if place == "epoch end" else "on_step_end"
    told = f"callback At failed in {method} at step 4: KeyError: 'missing'"
    assert (failed.error_type, failed.message) == ("ConfigError", told)
    assert failed.output.count('raise KeyError("missing")') == 2  # told at once, and raised
    assert (other.error_type, other.message) == ("ConfigError", f"on rank 1: {told}")


def _terminated(folder: str) -> str:
    px.init()
    kill = At(1, 6, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    try:
        train([kill, px.ModelCheckpoint(folder, every_epochs=0)], epochs=500)
    except SystemExit as caught:
        return f"exit {caught.code}"
    return "continued"


def test_sigterm_of_one_rank_saves_all_and_exits_with_0(tmp_path: Path) -> None:
    assert run_ranks(_terminated, 2, str(tmp_path)) == ["exit 0", "exit 0"]
    loaded = px.load(tmp_path, nn.Linear(4, 1))
    assert loaded.step >= 6
    assert loaded.extra is not None
    assert loaded.extra["run"]["step"] == loaded.step


def _with_other_callbacks() -> None:
    rank = px.init().rank
    train([px.LossMonitor()] if rank else [px.TimeMonitor()])


def test_ranks_with_other_callbacks_are_told_so() -> None:
    for outcome in run_ranks(_with_other_callbacks, 2, expect_failure=True):
        assert "callbacks[0] must be the same on all ranks, found TimeMonitor on rank 0; LossMonitor on rank 1" in (
            outcome.message
        )
