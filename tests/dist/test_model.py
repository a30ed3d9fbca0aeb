"""One script with `px.Model`, on one process and two ranks, in every mode: equal losses and exact results."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phalanx as px
from phalanx.data import vision
from phalanx.data.readers.cifar import RECORD_BYTES, TRAIN_FILES, Cifar10Dataset
from phalanx.errors import ConfigError
from phalanx.parallel.tensor.layers.linear import ColumnLinear
from phalanx.train.callbacks.run import Run
from ranks import run_ranks

pytestmark = pytest.mark.dist

ROWS, CLASSES = 70, 7


class Losses(px.Callback):
    """Keeps the loss of every update over all ranks, and stops where it is told."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.global_losses: list[float] = []
        self.own: list[Tensor] = []
        self.stop_at = stop_at

    def on_update(self, run: Run) -> None:
        assert run.loss is not None
        self.own.append(run.loss)

    def on_step_end(self, run: Run) -> None:
        self.global_losses.append(run.global_loss())
        if run.step == self.stop_at:
            run.stop("seen enough")


def data(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (ROWS, 1), generator=generator, dtype=torch.int32)
    return torch.randn(ROWS, 6, generator=generator) * scale, labels


def script(mode: px.ParallelMode, *, cut: str = "column", **settings: Any) -> px.Model:
    """The script, of which the mode is the only edit."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    px.shard(net, {"2": cut})
    loss = px.SoftmaxCrossEntropyExpand(sparse=True)
    return px.Model(
        net, loss, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), ["acc1"], parallel_mode=mode, **settings
    )


def of_modes(modes: list[px.ParallelMode], folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in modes:
        seen, sunk, model = Losses(), Losses(), script(mode)
        evaluated = [model.eval(data(), batch_size=9)]
        model.train(2, data(), [seen], global_batch=16)
        evaluated.append(model.eval(data(), batch_size=9))
        other = script(mode)
        other.train(2, data(), [sunk], dataset_sink_mode=True, sink_size=3, global_batch=16)
        bitwise = all(map(torch.equal, seen.own, sunk.own)) and len(seen.own) == len(sunk.own) == 10
        first, rest = Losses(stop_at=3), Losses()
        script(mode).train(2, data(), [first, px.ModelCheckpoint(f"{folder}/{mode}")], global_batch=16)
        script(mode).train(2, data(), [rest], global_batch=16, resume=f"{folder}/{mode}")
        found[mode] = {
            "losses": seen.global_losses,
            "sinks": sunk.global_losses,
            "bitwise": bitwise,
            "resumed": first.global_losses + rest.global_losses,
            "evaluated": evaluated,
            "predicted": model.predict(TensorDataset(*data()), batch_size=4),
            "own": model.predict(data()[0][:2]).shape,
            "layer": type(model.net[2]).__name__,
        }
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_ranks(of_modes, 1, [px.ParallelMode.STAND_ALONE], str(tmp_path_factory.mktemp("alone")))
    return found[px.ParallelMode.STAND_ALONE]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    modes = [px.ParallelMode.DATA_PARALLEL, px.ParallelMode.HYBRID_PARALLEL]
    return run_ranks(of_modes, 2, modes, str(tmp_path_factory.mktemp("two")), timeout_s=90)


@pytest.mark.parametrize("mode", [px.ParallelMode.DATA_PARALLEL, px.ParallelMode.HYBRID_PARALLEL])
def test_every_mode_gives_what_one_process_gives(
    mode: px.ParallelMode, alone: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for found in (rank[mode] for rank in two_ranks):
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        for mine, wanted in zip(found["evaluated"], alone["evaluated"], strict=True):
            assert mine["acc1"] == wanted["acc1"]
            assert mine["loss"] == pytest.approx(wanted["loss"], abs=1e-4)
        torch.testing.assert_close(found["predicted"], alone["predicted"], atol=1e-4, rtol=1e-4)
        assert found["own"] == (2, CLASSES)
    assert two_ranks[0][mode]["layer"] == ("Linear" if mode == "data_parallel" else "ModelParallelLinear")


def test_sinks_change_no_bit_and_tell_the_loss_once_each(
    alone: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for found in (alone, *(rank[mode] for rank in two_ranks for mode in rank)):
        assert found["bitwise"]
        # 5 batches an epoch in sinks of 3: the last of each epoch has 2.
        assert found["sinks"] == [found["losses"][step] for step in (2, 4, 7, 9)]


def test_a_resumed_run_goes_on_inside_the_epoch_exactly(alone: dict[str, Any], two_ranks: list[dict[str, Any]]) -> None:
    for found in (alone, *(rank[mode] for rank in two_ranks for mode in rank)):
        assert found["resumed"] == found["losses"]


def of_three(folder: str) -> list[float]:
    rest = Losses()
    script(px.ParallelMode.DATA_PARALLEL).train(2, data(), [rest], global_batch=16, resume=folder)
    return rest.global_losses


def of_two(folder: str) -> list[float]:
    first = Losses(stop_at=3)
    model = script(px.ParallelMode.DATA_PARALLEL)
    model.train(2, data(), [first, px.ModelCheckpoint(folder)], dataset_sink_mode=True, sink_size=3, global_batch=16)
    return first.global_losses


def test_three_ranks_go_on_where_two_stopped_inside_a_pass(tmp_path: Path, alone: dict[str, Any]) -> None:
    assert run_ranks(of_two, 2, str(tmp_path))[0] == pytest.approx(alone["losses"][2:3], abs=1e-4)
    for found in run_ranks(of_three, 3, str(tmp_path)):
        assert found == pytest.approx(alone["losses"][3:], abs=1e-4)


def of_sums() -> tuple[list[Tensor], str]:
    moved = []
    for mean in (True, False):
        px.reset_auto_parallel_context()
        px.set_auto_parallel_context(parallel_mode="data_parallel", mirror_mean=mean)
        net = nn.Linear(6, CLASSES)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        model = px.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.1))
        model.train(1, data(), global_batch=ROWS)
        moved.append(net.weight.detach().clone())
        del model, net
        gc.collect()  # models of one job have one strategy
    px.reset_auto_parallel_context()
    px.set_auto_parallel_context(device_num=8)
    with pytest.raises(ConfigError) as caught:
        px.Model(nn.Linear(6, CLASSES)).predict(data()[0])
    return moved, str(caught.value)


def test_mirror_mean_false_sums_gradients_and_device_num_is_compared() -> None:
    for rank, ((mean, summed), message) in enumerate(run_ranks(of_sums, 2)):
        assert mean.abs().max() > 0
        torch.testing.assert_close(summed, 2 * mean)
        assert f"says device_num=8, and this is rank {rank} of 2" in message


def of_classes(world_size: int) -> dict[str, Any]:
    strategy = px.DistributedStrategy(hybrid_configs={"mp_degree": 2}) if world_size == 2 else None
    model, seen = script(px.ParallelMode.SEMI_AUTO_PARALLEL, cut="vocab", strategy=strategy), Losses()
    model.train(2, data(1e4), [seen], global_batch=16, shuffle=False)
    kind, outputs = type(model.net[2]), model.predict(TensorDataset(*data(1e4)))
    by_hand = None
    if world_size == 2:
        assert kind is ColumnLinear
        logits = model.net(data()[0])
        assert logits.shape == (ROWS, (4, 3)[px.current().rank])
        by_axis = px.SoftmaxCrossEntropyExpand(sparse=True, axis="model")(logits, data()[1])
        wide = px.vocab_cross_entropy(logits, data()[1].squeeze(1).long(), axis="model")
        by_hand = (by_axis.item(), wide.item())
        dense = torch.nn.functional.one_hot(data()[1].squeeze(1).long(), CLASSES).float()
        torch.testing.assert_close(px.SoftmaxCrossEntropyExpand(axis="model")(logits, dense), by_axis)
    return {
        "losses": seen.global_losses,
        "evaluated": model.eval(data(1e4)),
        "outputs": outputs,
        "by_hand": by_hand,
    }


def test_logits_cut_by_classes_give_the_loss_of_whole_ones_at_any_magnitude() -> None:
    (alone,) = run_ranks(of_classes, 1, 1)
    for found in run_ranks(of_classes, 2, 2):
        assert np.isfinite(found["losses"]).all()
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6, abs=1e-6)
        assert found["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-6, abs=1e-6)
        torch.testing.assert_close(found["outputs"], alone["outputs"])
        assert found["by_hand"][0] == pytest.approx(found["by_hand"][1], rel=1e-6)


class AtStep(px.Callback):
    def __init__(self, act: Any) -> None:
        self._act = act

    def on_step_end(self, run: Run) -> None:
        self._act()


def acting_inside() -> tuple[list[list[float]], list[str]]:
    """Losses of a training plain and evaluated at every step; what a mistake of rank 1 alone gives here."""
    rank, losses, told = px.init().rank, [], []
    for look in (False, True):
        model, seen = script(px.ParallelMode.DATA_PARALLEL), Losses()
        evaluate = AtStep(lambda model=model: model.eval(data(), batch_size=9))
        model.train(1, data(), [seen, evaluate] if look else [seen], global_batch=16)
        losses.append(seen.global_losses)
    again = AtStep(lambda: model.train(1, data(), global_batch=16) if rank == 1 else None)
    for mistake in (again, px.EarlyStopping("acc1" if rank == 0 else "acc")):
        with pytest.raises(ConfigError) as caught:
            model.train(1, data(), mistake, global_batch=16, valid_dataset=data())
        told.append(str(caught.value))
    return losses, told


def test_evaluating_inside_changes_nothing_and_mistakes_of_one_rank_end_all() -> None:
    for losses, told in run_ranks(acting_inside, 2):
        assert losses[0] == losses[1]
        assert "Model.train was called while this Model trains" in told[0]
        assert "EarlyStopping follows the metric 'acc', and the evaluation gives acc1, loss" in told[1]


def test_one_eighth_of_cifar_is_195_batches_and_the_monitor_prints_their_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in TRAIN_FILES:
        records = np.zeros((10_000, RECORD_BYTES), np.uint8)
        records[:, 0] = np.arange(10_000) % 10
        records[:, 1:64] = records[:, :1] * 25
        (tmp_path / name).write_bytes(records.tobytes())
    dataset = Cifar10Dataset(tmp_path, num_shards=8, shard_id=3)
    dataset = dataset.map(vision.TypeCast(torch.int32), "label")
    dataset = dataset.map([vision.Rescale(1 / 255, 0.0), vision.HWC2CHW()], "image")
    dataset = dataset.shuffle(buffer_size=10).batch(32, drop_remainder=True).repeat(2)
    assert dataset.get_dataset_size() == 195
    net = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(12, 10))
    model = px.Model(net, px.SoftmaxCrossEntropyExpand(sparse=True), torch.optim.SGD(net.parameters(), 0.01))
    run = model.train(2, dataset, [px.LossMonitor()], dataset_sink_mode=True)
    assert run.step == 390
    lines = [line.partition(", loss: ")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["global_step: 194", "global_step: 389"]
