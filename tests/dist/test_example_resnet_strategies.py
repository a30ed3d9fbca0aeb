"""The strategy files of the ResNet example: each trains on two ranks, the exact ones as plain data parallel does."""

from __future__ import annotations

import functools
import gc
import runpy
import sys
from pathlib import Path

import pytest
import torch

import phalanx as px
from phalanx.parallel.session import session
from ranks import run_ranks

pytestmark = pytest.mark.dist

FOLDER = Path(__file__).parents[2] / "examples" / "resnet"
FILES = {path.stem: path for path in (FOLDER / "strategies").iterdir()}
SMOKE = (
    "--global-batch",
    "32",
    "--width",
    "8",
    "--norm",
    "group",
    "--epochs",
    "1",
    "--steps",
    "6",
    "--warmup-steps",
    "0",
    "--lr",
    "0.02",
)

EXACT = {"fusion", "overlap", "hierarchical", "recompute", "sharding", "ema", "sync_batch_norm"}
"""What changes how a step is computed, not what it computes."""

CLOSE = {"fp16_allreduce": 2e-3, "amp": 0.05, "amp_float16": 0.05}
"""What rounds."""

COMPILED = {"graph"}  # held by test_example_resnet.py, which has the time to compile
RATES = {"lamb": "0.01", "lars": "1.0"}

TRAINED = sorted(set(FILES) - COMPILED)
PLAIN = ""
GROUPS = [tuple([PLAIN, *TRAINED][start::3]) for start in range(3)]
"""The files that share the start of two ranks."""


def test_every_file_says_what_it_is_for_and_is_listed():
    guide = (FOLDER.parents[1] / "docs" / "guide.md").read_text()
    for name, path in FILES.items():
        assert path.read_text().startswith("# ")
        assert f"`{name}.yaml`" in guide
    assert set(CLOSE) | EXACT | COMPILED | set(RATES) <= set(FILES)


def losses_under(name: str) -> list[float]:
    """Return the losses of a run under one of the files, which both ranks report alike."""
    return _trained(next(group for group in GROUPS if name in group))[name]


@functools.cache
def _trained(names: tuple[str, ...]) -> dict[str, list[float]]:
    first, second = run_ranks(_losses_of, 2, names, timeout_s=110)
    assert first == second
    return first


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return losses_under(PLAIN)


@pytest.mark.parametrize("name", TRAINED)
def test_a_strategy_trains_on_two_ranks(name: str, plain: list[float]):
    losses = losses_under(name)
    assert losses[0] == pytest.approx(plain[0], abs=0.02)  # the same model and rows
    assert min(losses) < 0.95 * losses[0]
    if name in EXACT:
        assert losses == pytest.approx(plain, abs=1e-4)
    if name in CLOSE:
        assert losses[:4] == pytest.approx(plain[:4], abs=CLOSE[name])  # then rounding grows


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, plain: list[float]):
    kept = ["--checkpoint", str(tmp_path), "--save-every", "3"]
    first = run_ranks(_losses, 2, "--steps", "3", *kept)[0]
    second = run_ranks(_losses, 2, *kept)[0]
    assert first + second == pytest.approx(plain, abs=1e-5)


def _losses_of(names: tuple[str, ...]) -> dict[str, list[float]]:
    found = {}
    for name in names:
        rate = ["--lr", RATES[name]] if name in RATES else []
        found[name] = _losses(*rate, *(["--strategy", str(FILES[name])] if name else []))
        session.reset()
        gc.collect()  # the next trains under another strategy
    return found


def _losses(*arguments: str) -> list[float]:
    """Run the example in this rank; return the loss of every step."""
    losses: list[float] = []

    def recorded(value: torch.Tensor) -> torch.Tensor:
        mean = global_mean(value)
        losses.append(mean.item())
        return mean

    global_mean = px.global_mean
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(px, "global_mean", recorded)
        patch.setattr(px, "evaluate", lambda *_, **__: {"acc1": 0.0, "acc5": 0.0})  # costs more than the training
        patch.setattr(sys, "argv", ["train.py", *SMOKE, *arguments])
        patch.syspath_prepend(str(FOLDER))
        runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")
    return losses
