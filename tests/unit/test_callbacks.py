"""Callbacks in one process: what each prints, writes, keeps and refuses."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, ReduceLROnPlateau, StepLR

import phalanx as px
from phalanx.errors import ConfigError
from phalanx.train import events
from phalanx.train.callbacks import loggers, progress
from phalanx.train.callbacks.early_stopping import BestMetric
from phalanx.train.callbacks.run import Run
from small_runs import train


class Seen(px.Callback):
    """Notes every call with the step it came at."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_train_begin(self, run: Run) -> None:
        self.calls.append(("begin", run.step))

    def on_epoch_begin(self, run: Run) -> None:
        self.calls.append(("epoch", run.step))

    def on_update(self, run: Run) -> None:
        self.calls.append(("update", run.step))

    def on_step_end(self, run: Run) -> None:
        self.calls.append(("step", run.step))

    def on_eval_end(self, run: Run) -> None:
        self.calls.append(("eval", run.step))

    def on_epoch_end(self, run: Run) -> None:
        self.calls.append(("epoch end", run.step))

    def on_train_end(self, run: Run) -> None:
        self.calls.append(("end", run.step))

    def close(self) -> None:
        self.calls.append(("close", 0))


class At(px.Callback):
    """Does something at the end of a step."""

    def __init__(self, step: int, act: Any) -> None:
        self._step, self._act = step, act

    def on_step_end(self, run: Run) -> None:
        if run.step == self._step:
            self._act(run)


def series(name: str, *values: float) -> Any:
    left = list(values)
    return lambda _: {name: left.pop(0)}


def test_every_edge_comes_in_its_order() -> None:
    seen = Seen()
    run, _ = train([seen], epochs=2, sink=3, evaluate=series("acc1", 0.1, 0.2))
    one = [("update", 1), ("update", 2), ("update", 3), ("step", 3), ("update", 4), ("step", 4)]
    epoch = [("epoch", 0), *one, ("eval", 4), ("epoch end", 4)]
    after = [(name, step + 4) for name, step in epoch]
    assert seen.calls == [("begin", 0), *epoch, *after, ("end", 8), ("close", 0)]
    assert (run.step, run.samples, run.epoch, run.metrics) == (8, 46, 2, {"acc1": 0.2})


def test_the_loss_line_is_that_of_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    _, _ = train([px.LossMonitor()], epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["global_step: 3", "global_step: 7"]
    assert all(len(line.partition("loss: ")[2].partition(".")[2]) == 3 for line in lines)
    train([px.LossMonitor(per_print_times=3)], epochs=2)
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == ["global_step: 2", "global_step: 5"]
    train([px.LossMonitor(per_print_times=3)], epochs=2, sink=4)
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == ["global_step: 3", "global_step: 7"]


def test_the_time_of_an_epoch_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    train([px.TimeMonitor()], epochs=2)
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"training \d+\.\d s in 8 steps", last)
    whole, each = (float(part.split()[-2]) for part in lines[0].split(","))
    assert each == pytest.approx(whole / 4, abs=0.001)


def test_compiling_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    def compiled(run: Run) -> None:
        run.compile_s = 1000.0

    train([At(2, compiled), px.TimeMonitor()], epochs=1)
    epoch, last = capsys.readouterr().out.splitlines()
    assert epoch.endswith(" ms without 1000.0 s of compiling")
    assert last.endswith(" s in 4 steps, compiling 1000.0 s")


def test_progress_is_lines_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "phalanx.train"):
        train([px.ProgressBar()], epochs=2, evaluate=series("acc1", 0.125, 0.25))
    lines = [record.getMessage() for record in caplog.records if "samples/s" in record.getMessage()]
    assert len(lines) == 2
    assert lines[1].startswith("epoch 2/2  4/4  loss ")
    assert lines[1].endswith("eval acc1 0.25")


@pytest.mark.parametrize("sink", [1, 4])
def test_progress_has_one_line_of_an_epochs_end(sink: int, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, "phalanx.train"):
        train([px.ProgressBar()], epochs=1, sink=sink, evaluate=series("acc1", 0.125))
    lines = [record.getMessage() for record in caplog.records if "samples/s" in record.getMessage()]
    assert [line.split("  ")[1] for line in lines] == (["1/4", "2/4", "3/4", "4/4"] if sink == 1 else ["4/4"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_bar_on_a_terminal_and_a_line_of_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    train([px.ProgressBar(), px.LossMonitor()], epochs=2, evaluate=series("acc1", 0.125, 0.25))
    assert sys.stdout is terminal
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", line).strip() for line in terminal.getvalue().splitlines()]
    ends = [line for line in lines if line.startswith("epoch") and "eval" in line]
    assert [line.split("  ")[:2] for line in ends] == [["epoch 1/2", "4/4"], ["epoch 2/2", "4/4"]]
    assert [line for line in lines if line.startswith("global_step: 7")]
    assert any("━" in line and "/4" in line for line in lines)


def test_training_stops_when_patience_is_at_its_end() -> None:
    stopper = px.EarlyStopping("loss", patience=2)
    run, _ = train([stopper], epochs=9, evaluate=series("loss", 3.0, 2.0, 2.5, 2.0, 1.0))
    assert (run.epoch, stopper.best) == (4, 2.0)
    assert run.stop_reason == "loss got no better than 2 in the last 2 evaluations (now 2)"
    assert repr(run) == f"Run(epoch 4 of 9, 16 steps, loss 2, {run.stop_reason})"


@pytest.mark.parametrize(
    ("metric", "mode", "values", "improved"),
    [
        ("acc1", None, [0.5, 0.4, 0.6], [True, False, True]),
        ("val_loss", None, [0.5, 0.4, float("nan")], [True, True, False]),
        ("rmse", "max", [0.5, 0.4], [True, False]),
        ("auc", None, [float("nan"), 0.1], [False, True]),
    ],
)
def test_better_is_by_the_name_of_the_metric(metric: str, mode: Any, values: list[float], improved: list[bool]) -> None:
    best = BestMetric(metric, mode)
    assert [best.improves(value) for value in values] == improved


def test_a_change_below_min_delta_is_none() -> None:
    best = BestMetric("acc1", None, 0.1)
    assert [best.improves(value) for value in (0.5, 0.55, 0.65)] == [True, False, True]


@pytest.mark.parametrize("sink", [1, 4])
def test_schedules_step_with_updates_also_in_sinks(sink: int) -> None:
    rates = []
    noted = At(8, lambda run: rates.append(run.optimizer.param_groups[0]["lr"]))
    schedule = px.LearningRateSchedule(lambda optimizer: StepLR(optimizer, step_size=5, gamma=0.5))
    train([noted, schedule], epochs=3, sink=sink)
    assert rates == [0.05]
    assert schedule.scheduler.last_epoch == 12


def test_a_schedule_counts_updates_and_not_the_batches_of_a_merge() -> None:
    strategy = px.DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2}
    schedule = px.LearningRateSchedule(lambda optimizer: StepLR(optimizer, step_size=1))
    run, _ = train([schedule], epochs=2, strategy=strategy)
    assert (run.step, schedule.scheduler.last_epoch) == (4, 4)


def test_schedules_step_with_epochs_or_follow_a_metric() -> None:
    by_epoch = px.LearningRateSchedule(lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.5**epoch), every="epoch")
    train([by_epoch], epochs=3)
    assert by_epoch.scheduler.last_epoch == 3
    plateau = px.LearningRateSchedule(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0), monitor="loss")
    run, _ = train([plateau], epochs=3, evaluate=series("loss", 1.0, 2.0, 0.5))
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_evaluations_use_the_average_and_training_goes_on_with_the_weights() -> None:
    keeper = px.EMACallback(0.5, warmup=False)
    seen = []
    _, model = train([keeper], epochs=1, evaluate=lambda m: seen.append(m.weight.detach().clone()) or {})
    trained = model.weight.detach().clone()
    assert not torch.equal(seen[0], trained)
    with keeper.ema.swapped():
        assert torch.equal(seen[0], model.weight.detach())
    assert keeper.ema.updates == 4


def test_tables_and_json_hold_steps_epochs_and_metrics(tmp_path: Path) -> None:
    table, lines = px.CSVLogger(tmp_path / "a" / "run.csv", every_steps=3), px.JSONLogger(tmp_path / "run.jsonl")
    train([table, lines], epochs=2, evaluate=series("acc1", 0.5, float("nan")))
    with (tmp_path / "a" / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["epoch"], row["step"], row["eval/acc1"]) for row in rows] == [
        ("0", "2", ""), ("0", "3", "0.5"), ("1", "5", ""), ("1", "7", "nan"),
    ]  # fmt: skip
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(event["step"], event["samples"], event["lr"], event["eval/acc1"]) for event in events] == [
        (3, 23, 0.1, 0.5), (7, 46, 0.1, "nan"),
    ]  # fmt: skip
    assert float(rows[1]["loss"]) == events[0]["loss"]


def test_curves_are_written_for_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train([px.TensorBoard(tmp_path)], epochs=2, evaluate=series("acc1", 0.5, 0.75))
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in found.Scalars("eval/acc1")] == [(3, 0.5), (7, 0.75)]
    assert {"train/loss", "train/lr", "train/samples_per_s"} <= set(found.Tags()["scalars"])


def test_tensorboard_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"not installed\. Run `pip install 'phalanx\[tensorboard\]'`, or use CSVLogger"
    ):
        px.TensorBoard("runs")


def test_checkpoints_hold_the_run_and_its_callbacks(tmp_path: Path) -> None:
    def callbacks(*more: px.Callback) -> list[px.Callback]:
        return [
            px.ModelCheckpoint(tmp_path / "kept", every_steps=3, keep=2),
            px.EarlyStopping("loss", patience=5),
            px.EMACallback(0.5),
            px.LearningRateSchedule(lambda optimizer: MultiStepLR(optimizer, [2, 5, 9], gamma=0.5)),
            px.LearningRateSchedule(lambda optimizer: LambdaLR(optimizer, lambda step: 1.0)),
            *more,
        ]

    whole, expected = train(callbacks(), epochs=3, evaluate=series("loss", 3.0, 2.0, 1.0))
    for folder in (tmp_path / "kept").iterdir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    stopping = At(6, lambda run: run.stop("enough"))
    part, _ = train(callbacks(stopping), epochs=3, evaluate=series("loss", 3.0))
    assert (part.stop_reason, part.epoch, part.batches) == ("enough", 1, 2)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-3", "step-6"]
    again = callbacks()
    seen = Seen()
    rest, model = train([*again, seen], epochs=3, resume=tmp_path / "kept", evaluate=series("loss", 2.0, 1.0))
    assert seen.calls[:3] == [("begin", 6), ("epoch", 6), ("update", 7)]
    assert (rest.step, rest.samples, rest.epoch) == (whole.step, whole.samples, whole.epoch) == (12, 69, 3)
    assert torch.equal(model.weight, expected.weight)
    assert again[1].best == 1.0
    assert torch.equal(rest.ema.state_dict()["shadow"]["weight"], whole.ema.state_dict()["shadow"]["weight"])
    assert rest.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path: Path) -> None:
    saver = px.ModelCheckpoint(tmp_path, keep=1, best="acc1", background=False)
    train([saver], epochs=3, evaluate=series("acc1", 0.1, 0.9, 0.5))
    assert saver.best == 0.9
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("**/step-*")) == [
        "best/step-8",
        "step-12",
    ]
    assert px.load(tmp_path / "best", nn.Linear(4, 1)).step == 8


def test_sigterm_saves_after_the_step_and_exits_with_0(tmp_path: Path) -> None:
    seen = Seen()
    kill = At(5, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        train([kill, seen, px.ModelCheckpoint(tmp_path)], epochs=3)
    assert caught.value.code == 0
    assert seen.calls[-3:] == [("step", 5), ("end", 5), ("close", 0)]
    assert px.load(tmp_path, nn.Linear(4, 1)).step == 5
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_names_the_callback_and_closes_the_others() -> None:
    def fail(_: Run) -> None:
        raise KeyError("missing")

    seen = Seen()
    with pytest.raises(
        ConfigError, match=r"callback At failed in on_step_end at step 2: KeyError: 'missing'"
    ) as caught:
        train([At(2, fail), seen])
    assert isinstance(caught.value.__cause__, KeyError)
    assert seen.calls[-2:] == [("step", 2), ("close", 0)]


class EveryStep(px.Callback):
    needs_every_step = True


@pytest.mark.parametrize(
    ("callbacks", "sink", "told"),
    [
        ([px.LossMonitor], 1, r"has the class LossMonitor\. Make one: LossMonitor\(\)"),
        ([print], 1, r"takes phalanx\.Callback objects, found builtin_function_or_method"),
        ([px.ModelCheckpoint(__file__)], 1, r"saves to a folder, and .*test_callbacks\.py is a file"),
        (print, 1, r"takes phalanx\.Callback objects, found builtin_function_or_method"),
        ("LossMonitor", 1, r"takes phalanx\.Callback objects, found str"),
        ([EveryStep()], 4, r"EveryStep must act after every step, and sinks of 4 steps were asked for"),
        ([px.EMACallback(), px.EMACallback()], 1, "two EMACallback"),
        ([px.LearningRateSchedule(lambda optimizer: 3)], 1, "found int"),
        ([px.LearningRateSchedule(StepLR(torch.optim.SGD([torch.ones(1)], lr=1.0), 1))], 1, "another optimizer than"),
        ([px.LearningRateSchedule(lambda o: StepLR(o, 1), monitor="loss")], 1, "no other scheduler takes one"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_training(callbacks: list[Any], sink: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        train(callbacks, sink=sink)


def test_an_object_given_twice_is_refused() -> None:
    twice = px.LossMonitor()
    with pytest.raises(ConfigError, match="one object twice"):
        train([twice, twice])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: px.LossMonitor(per_print_times=0), "per_print_times is a number of steps, found 0"),
        (lambda: px.EarlyStopping(patience=0), "patience of at least 1"),
        (lambda: px.EarlyStopping(mode="up"), "'min' or 'max', found 'up'"),
        (lambda: px.ModelCheckpoint("x", mode="max"), "without best="),
        (lambda: px.ModelCheckpoint("x", every_epochs=-1), "found -1"),
        (lambda: px.ModelCheckpoint("x", keep=0), "keep is a number of checkpoints, found 0"),
        (lambda: px.LearningRateSchedule(print, every="batch"), "'update' or 'epoch', found 'batch'"),
        (lambda: px.EMACallback().ema, "no average before training began"),
    ],
)
def test_wrong_settings_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


def test_a_metric_that_was_not_evaluated_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"follows the metric 'acc', and the evaluation gives acc1\. Did you mean 'acc1'"
    ):
        train([px.EarlyStopping("acc")], evaluate=series("acc1", 0.5))


def test_events_tell_speed_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MIN_INTERVAL_S", 0.0)
    with contextlib.closing(events.EventStream(str(tmp_path / "events.jsonl"))) as stream:
        monkeypatch.setattr(events, "_stream", stream)
        train([], epochs=2)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["epoch"], event["samples"]) for event in told] == [
        (0, 0, 6), (1, 0, 12), (2, 0, 18), (3, 0, 23), (4, 1, 29), (5, 1, 35), (6, 1, 41), (7, 1, 46),
    ]  # fmt: skip
    assert {(event["epochs"], event["total_steps"]) for event in told} == {(2, 8)}
    assert all(
        event["samples_per_s"] > 0 and event["peak_memory_bytes"] >= event["memory_bytes"] > 1e7 for event in told
    )
    assert all(isinstance(event["loss"], float) and event["compile_s"] == 0 for event in told)


def test_a_run_without_steps_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    train([px.LossMonitor(), px.TimeMonitor(), px.ProgressBar()], epochs=0)
    assert capsys.readouterr().out == ""


def test_two_savers_may_listen_and_records_go_on_in_another_call(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    savers = [px.ModelCheckpoint(tmp_path / name) for name in ("a", "b")]
    table = px.CSVLogger(tmp_path / "run.csv")
    for _ in range(2):
        train([*savers, table], epochs=1)
    assert signal.getsignal(signal.SIGTERM) is before
    assert (tmp_path / "run.csv").read_text().count("\n") == 1 + 2


class FailingToClose(px.Callback):
    def close(self) -> None:
        raise OSError("no room")


def test_all_are_closed_where_one_fails_to() -> None:
    first, second = Seen(), Seen()
    with pytest.raises(OSError, match="no room"):
        train([first, FailingToClose(), second], epochs=1)
    assert first.calls[-1] == second.calls[-1] == ("close", 0)


def test_rows_after_the_checkpoint_do_not_come_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def recorders() -> list[px.Callback]:
        return [px.CSVLogger(tmp_path / "run.csv", every_steps=1), px.JSONLogger(tmp_path / "run.jsonl", every_steps=1)]

    train([px.ModelCheckpoint(tmp_path / "kept", every_steps=3, keep=None), *recorders()], epochs=2)
    for path in (tmp_path / "run.csv", tmp_path / "run.jsonl"):
        with path.open("a") as file:
            file.write('{"step": 1')  # as a kill leaves it
    resumed = [*recorders(), px.EarlyStopping("loss")]
    train(resumed, epochs=2, resume=tmp_path / "kept" / "step-6", evaluate=series("loss", 1.0))
    assert "callback EarlyStopping starts fresh: the checkpoint has no state of it" in caplog.text
    with (tmp_path / "run.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == [0, 1, 2, 3, 3, 4, 5, 6, 7, 7]
    assert [json.loads(line)["step"] for line in (tmp_path / "run.jsonl").read_text().splitlines()] == steps
