"""A checkpoint that is loaded on fewer ranks continues with their shares of each batch, and with the same bits."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from dist.test_logical_replicas import CLIP, GLOBAL, adamw, digest, images, sgd, text
from phalanx.strategy import DistributedStrategy
from ranks import run_ranks

pytestmark = pytest.mark.dist

CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "images": (images, sgd, {"ema": True}),
    "text": (text, adamw, CLIP),
}
SHARDED_OR_MERGED: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "text, zero 1": (text, adamw, {"sharding": True, "sharding_configs": {"stage": 1}}),
    "images, zero 2": (images, sgd, {"sharding": True, "sharding_configs": {"stage": 2}}),
    "images, zero 3": (images, adamw, {"sharding": True, "sharding_configs": {"stage": 3}}),
    "images, merged": (images, sgd, {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}),
}
EPOCH = 5
"""Steps of one; the last global batch has 5 samples."""


def lines_of(logger: str) -> tuple[list[str], logging.Handler]:
    """Return the list in which the messages of a logger come from now on, and what puts them there."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    return lines, handler


def train_on(folder: Path, name: str, steps: int, replicas: int | None = None) -> tuple[str, list[str]]:
    """Resume if there is a checkpoint, train, save; return the digest of the weights and what loading said."""
    build, build_optimizer, settings = (CASES | SHARDED_OR_MERGED)[name]
    torch.manual_seed(1)
    net, data = build()
    strategy = DistributedStrategy(**settings)
    net, optimizer, loader = px.distribute(
        net, build_optimizer(net), data, global_batch=GLOBAL, strategy=strategy, seed=5, replicas=replicas
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    if replicas or "merged" in name:
        px.follow_updates(scheduler)
    lines, handler = lines_of("phalanx.parallel")
    checkpointer = px.Checkpointer(folder, net, optimizer, loader, scheduler=scheduler)
    checkpointer.resume()
    logging.getLogger("phalanx.parallel").removeHandler(handler)
    last = checkpointer.steps + steps
    while checkpointer.steps < last:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            scheduler.step()
            checkpointer.step()
            if checkpointer.steps == last:
                checkpointer.save()
                break
    checkpointer.close()
    return digest(net), [line for line in lines if "was trained with" in line]


def train_over(folder: Path, name: str, parts: Sequence[tuple[int, int]]) -> tuple[str, list[str]]:
    """Train on so many ranks for so many steps, one part after the other; return the last one's digest and lines."""
    for ranks, steps in parts:
        outcome = run_ranks(partial(train_on, folder, name, steps), ranks)[0]
    return outcome


def train_both(folder: Path, steps: int) -> list[str]:
    """Train one case after the other in the same processes."""
    digests = []
    for name in CASES:
        digests.append(train_on(folder / name, name, steps)[0])
        gc.collect()  # the next strategy is another
    return digests


def test_one_process_may_train_several_models_one_after_the_other(tmp_path: Path) -> None:
    undisturbed = run_ranks(train_both, 2, tmp_path / "undisturbed", 6)[0]
    run_ranks(train_both, 2, tmp_path / "disturbed", 3)
    assert run_ranks(train_both, 1, tmp_path / "disturbed", 3)[0] == undisturbed


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_with_the_same_bits_on_fewer_ranks(tmp_path: Path, name: str) -> None:
    undisturbed, silent = train_over(tmp_path / "undisturbed", name, [(4, 11)])
    assert not silent
    weights, lines = train_over(tmp_path / "three", name, [(4, 3), (3, 8)])
    assert weights == undisturbed
    line = (
        "the checkpoint was trained with 4 data-parallel ranks: continuing with logical_replicas=4 on 3 ranks; "
        "logical_replicas=0 turns it off"
    )
    assert lines == [line]
    assert train_over(tmp_path / "many", name, [(4, 2), (2, 2), (1, 3), (4, 4)])[0] == undisturbed


@pytest.mark.parametrize("name", SHARDED_OR_MERGED)
def test_shards_and_merged_gradients_go_on_too(tmp_path: Path, name: str) -> None:
    undisturbed, silent = train_over(tmp_path / "undisturbed", name, [(4, 10)])  # even: no merged batch is left over
    assert not silent
    weights, lines = train_over(tmp_path / "two", name, [(4, 4), (2, 6)])
    assert weights == undisturbed
    (line,) = lines
    assert line.endswith("continuing with logical_replicas=4 on 2 ranks; logical_replicas=0 turns it off")
    assert train_over(tmp_path / "many", name, [(4, 2), (3, 2), (1, 2), (2, 2), (4, 2)])[0] == undisturbed


def test_what_replicas_were_asked_for_goes_on_without_asking_again(tmp_path: Path) -> None:
    undisturbed = run_ranks(partial(train_on, tmp_path / "undisturbed", "text", 6, 4), 1)[0][0]
    run_ranks(partial(train_on, tmp_path / "asked", "text", 3, 4), 2)
    weights, lines = run_ranks(partial(train_on, tmp_path / "asked", "text", 3), 1)[0]
    assert weights == undisturbed
    assert lines[0].startswith("the checkpoint was trained with 4 logical replicas: continuing with logical_replicas=4")


def test_more_ranks_and_an_explicit_zero_split_over_the_ranks(tmp_path: Path) -> None:
    run_ranks(partial(train_on, tmp_path, "images", 3), 2)
    _, lines = run_ranks(partial(train_on, tmp_path, "images", 1), 3)[0]
    assert "there are more ranks than shares of a batch" in lines[0]
    assert run_ranks(partial(train_on, tmp_path, "images", 1, 0), 1)[0][1] == []
    run_ranks(partial(train_on, tmp_path / "asked", "images", 3, 4), 2)
    run_ranks(partial(train_on, tmp_path / "asked", "images", 3, 0), 2)  # is no error


class Updates(px.Callback):
    """Counts updates."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, run: Any) -> None:
        self.count += 1
        assert run.steps_per_epoch in (EPOCH, 2 * EPOCH)  # batches of this rank


def train_model(folder: Path, epochs: int) -> tuple[str, int]:
    torch.manual_seed(1)
    net, data = images()
    model, updates = px.Model(net, nn.CrossEntropyLoss(), sgd(net)), Updates()
    loader = px.data.ShardedLoader(data, batch_size=GLOBAL // 4, seed=5)
    model.train(epochs, loader, callbacks=[updates, px.ModelCheckpoint(folder)], resume=True)
    return digest(net), updates.count


def test_a_model_goes_on_with_the_global_batch_of_its_first_ranks(tmp_path: Path) -> None:
    undisturbed = run_ranks(partial(train_model, tmp_path / "undisturbed", 3), 4)[0][0]
    run_ranks(partial(train_model, tmp_path / "disturbed", 1), 4)
    run_ranks(partial(train_model, tmp_path / "disturbed", 2), 3)
    weights, updates = run_ranks(partial(train_model, tmp_path / "disturbed", 3), 2)[0]
    assert updates == EPOCH
    assert weights == undisturbed


def train_with(loop: str, folder: Path) -> list[str]:
    """Resume if there is a checkpoint, train in a way that replicas cannot follow, save; return what loading said."""
    torch.manual_seed(1)
    net, data = images()
    settings: dict[str, Any] = {"sharding": True} if loop == "sharded" else {}
    net, optimizer, loader = px.distribute(
        net, sgd(net), data, global_batch=GLOBAL, strategy=DistributedStrategy(**settings), seed=5
    )
    lines, _ = lines_of("phalanx.parallel")
    checkpointer = px.Checkpointer(folder, net, optimizer, loader)
    checkpointer.resume()
    for number, (x, y) in enumerate(loader):
        if loop == "accumulated" and number % 2 == 0:
            with px.no_sync(net):
                F.cross_entropy(net(x), y).backward()
            continue
        if loop == "weighted":
            losses = F.cross_entropy(net(x), y, reduction="sum", ignore_index=0)
            px.weighted_mean(losses, (y != 0).sum()).backward()
        else:
            F.cross_entropy(net(x), y).backward()
        if loop == "twice":
            F.cross_entropy(net(x), y).backward()
        if loop == "every other" and number % 2:
            continue
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
    checkpointer.save()
    checkpointer.close()
    return [line for line in lines if "was trained with" in line]


@pytest.mark.parametrize(
    ("loop", "part"),
    [
        ("accumulated", "its loop made 2 updates of 5 batches and 2 backward passes"),
        ("every other", "its loop made 3 updates of 5 batches and 5 backward passes"),
        ("twice", "its loop made 5 updates of 5 batches and 10 backward passes"),
        ("weighted", "its loss is a mean over labels that count"),
    ],
)
def test_a_loop_that_replicas_cannot_follow_goes_on_over_its_ranks(tmp_path: Path, loop: str, part: str) -> None:
    assert run_ranks(train_with, 4, loop, tmp_path)[0] == []
    for ranks in (2, 1):  # what was seen once stays in its checkpoints
        (line,) = run_ranks(train_with, ranks, loop, tmp_path)[0]
        assert line.startswith("the checkpoint was trained with ")
        assert f"continuing with one share for each of {ranks} rank" in line
        assert part in line


def test_a_number_of_shards_that_is_no_power_of_two_rounds_otherwise(tmp_path: Path) -> None:
    run_ranks(train_with, 3, "sharded", tmp_path)
    (line,) = run_ranks(train_with, 2, "sharded", tmp_path)[0]
    assert "logical_replicas=3 on 2 ranks, with sums that round otherwise, for torch divides" in line


def train_and_log(folder: Path) -> tuple[list[str], list[float]]:
    """Resume if there is a checkpoint, train an epoch whose loop logs the mean loss; return what loading said too."""
    torch.manual_seed(1)
    net, data = text()
    net, optimizer, loader = px.distribute(net, sgd(net), data, global_batch=GLOBAL, seed=5)
    lines, _ = lines_of("phalanx.parallel")
    checkpointer, losses = px.Checkpointer(folder, net, optimizer, loader), []
    checkpointer.resume()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        losses.append(px.global_mean(loss).item())
        optimizer.step()
        checkpointer.step()
    checkpointer.save()
    checkpointer.close()
    return [line for line in lines if "was trained with" in line], losses


def test_a_mean_over_ranks_in_the_loop_is_that_of_its_pass_and_needs_equally_many(tmp_path: Path) -> None:
    run_ranks(train_and_log, 4, tmp_path)
    (line,), losses = run_ranks(train_and_log, 2, tmp_path)[0]
    assert "logical_replicas=4 on 2 ranks" in line
    assert len(losses) == 2 * EPOCH
    assert all(2.0 < loss < 4.0 for loss in losses), "about log(20), of whole passes"
    (line,), losses = run_ranks(train_and_log, 3, tmp_path)[0]
    assert "its loop averages over the ranks at every batch, and some would have more batches" in line
    assert len(losses) == EPOCH
