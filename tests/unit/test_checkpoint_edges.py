"""Checkpoints of unusual objects, folders and moments."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import phalanx as px
from phalanx.checkpoint import background
from phalanx.checkpoint.graceful_stop import GracefulStop
from phalanx.errors import BackendError, ConfigError


def test_numbers_of_any_kind_count_and_others_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    assert px.save(tmp_path, model, step=np.int64(7), keep=torch.tensor(2)).name == "step-7"
    assert px.load(tmp_path, model).step == 7
    for wrong in (2.0, "3", -1):
        with pytest.raises(ConfigError, match=rf"asked for step={wrong!r}\. Give a whole number, 0 or more"):
            px.save(tmp_path, model, step=wrong)
    for name in ("every", "keep"):
        with pytest.raises(ConfigError, match=rf"asked for {name}=0\. Give a whole number, 1 or more"):
            px.Checkpointer(tmp_path, model, **{name: 0})
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


def test_a_job_whose_first_save_was_cut_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "rank-0-00000000.safetensors").touch()
    checkpointer = px.Checkpointer(tmp_path, nn.Linear(1, 1))
    assert checkpointer.resume() is None
    checkpointer.steps = 2
    checkpointer.save()
    checkpointer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_folder_that_is_called_as_we_call_ours_is_a_folder_of_checkpoints(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    px.save(tmp_path / "step-5", model, step=1)
    assert px.load(tmp_path / "step-5", model).path == tmp_path / "step-5" / "step-1"


def test_what_a_link_leads_to_is_read_and_never_removed(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    elsewhere = px.save(tmp_path / "elsewhere", model, step=3)
    there = sorted(path.name for path in elsewhere.iterdir())
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "step-3").symlink_to(elsewhere)
    assert px.load(runs, model).path == runs / "step-3"
    px.save(runs, model, step=4, keep=1)
    assert [path.name for path in runs.iterdir()] == ["step-4"]
    assert sorted(path.name for path in elsewhere.iterdir()) == there


@pytest.mark.parametrize("in_background", [False, True])
def test_views_that_conjugate_or_negate_come_back(tmp_path: Path, in_background: bool) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.register_buffer("conjugated", torch.randn(3, dtype=torch.complex64).conj())
        model.register_buffer("negated", torch.randn(3, dtype=torch.complex64).conj().imag)
        return model

    model, other = make(), make()
    px.save(tmp_path, model, background=in_background)
    px.checkpoint.wait()
    px.load(tmp_path, other)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name))


def test_a_tensor_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("wide", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(ConfigError, match=r"'model/wide' is of torch.complex128, which cannot be saved"):
        px.save(tmp_path, model)
    with torch.device("meta"):
        model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"'model/weight' of shape \[1, 1\] is meta, and only dense tensors can"):
        px.save(tmp_path, model)
    with pytest.raises(ConfigError, match=r"found list\..* a second optimizer goes into extra="):
        px.save(tmp_path, nn.Linear(1, 1), [])


def test_schedulers_inside_schedulers_have_their_milestones_again(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, lr_scheduler.SequentialLR]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        parts = [lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step), lr_scheduler.MultiStepLR(optimizer, [1, 1])]
        return model, optimizer, lr_scheduler.SequentialLR(optimizer, parts, [2])

    model, optimizer, scheduler = make()
    px.save(tmp_path, model, optimizer, scheduler=scheduler)
    model, optimizer, scheduler = make()
    px.load(tmp_path, model, optimizer, scheduler=scheduler)
    assert isinstance(scheduler._schedulers[1].milestones, Counter)
    assert [*scheduler._schedulers[1].milestones.elements()] == [1, 1]


def test_a_rate_held_as_a_tensor_stays_one(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)

    def optimizer(rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(rate), foreach=False)

    px.save(tmp_path, model, optimizer(0.5))
    other = optimizer(0.25)
    px.load(tmp_path, model, other)
    assert torch.equal(other.param_groups[0]["lr"], torch.tensor(0.5))


def test_a_wait_that_was_interrupted_can_be_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writing:
        joined = 0

        def join(self) -> None:
            self.joined += 1
            if self.joined == 1:
                raise KeyboardInterrupt

    writing = Writing()
    monkeypatch.setattr(background._saves, "thread", writing)
    with pytest.raises(KeyboardInterrupt):
        background.wait()
    background.wait()
    background.wait()
    assert writing.joined == 2


def test_why_a_save_failed_is_told_even_if_nothing_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(what: str, number: int) -> Any:
        def failing(*_: Any, **__: Any) -> None:
            raise OSError(number, what)

        return failing

    monkeypatch.setattr("os.fsync", fail("Input/output error", 5))
    monkeypatch.setattr("pathlib.Path.unlink", fail("Read-only file system", 30))
    with pytest.raises(BackendError, match="Input/output error"):
        px.save(tmp_path, nn.Linear(1, 1))


def test_tables_that_a_checkpoint_lacks_are_named_before_anything_is_changed(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Identity(), nn.Flatten(), nn.Linear(4, 1))
    px.save(tmp_path, plain)
    model = nn.Sequential(px.ps.SparseEmbedding(2), nn.Flatten(), nn.Linear(4, 1))
    px.distribute(model, torch.optim.SGD(model.parameters()))
    before = model[2].weight.detach().clone()
    with pytest.raises(ConfigError, match="holds no tables: it was saved without"):
        px.load(tmp_path, model)
    assert torch.equal(model[2].weight, before)


def test_a_checkpointer_that_is_closed_leaves_sigterm_to_a_later_one(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    first = px.Checkpointer(tmp_path, nn.Linear(1, 1))
    second = px.Checkpointer(tmp_path, nn.Linear(1, 1))
    first.close()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        second.step()
    signal.signal(signal.SIGTERM, before)


def test_a_closed_terminal_asks_to_stop_unless_it_is_ignored() -> None:
    for before, asked in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
        signal.signal(signal.SIGHUP, before)
        edge = GracefulStop(0, 1, None, "")
        edge.listen()
        os.kill(os.getpid(), signal.SIGHUP)
        assert edge.is_at(1) is asked
        edge.close()
        assert signal.getsignal(signal.SIGHUP) == before
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
