"""Every metric on 1, 2 and 3 ranks with uneven rows: the same bits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import ConfigError
from phalanx.train.metrics.base import AllRanks
from ranks import run_ranks

pytestmark = pytest.mark.dist


class Rows:
    """Sorted outputs of all rows, with what a rank without rows cannot know: their dtype and shape."""

    def reset(self) -> None:
        self.rows: list[Tensor] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        self.rows.append(target.to(torch.int16).unsqueeze(1))

    def compute(self, ranks: AllRanks) -> list[int]:
        rows = torch.cat(self.rows) if self.rows else torch.empty(0)
        return sorted(ranks.concat(rows).flatten().tolist())


def _classes(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (rows,), generator=generator)
    return torch.randint(6, (rows, 4), generator=generator) / 4 + torch.eye(4)[labels] / 2, labels


def _numbers(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-12, 12, (rows, 1), generator=generator)
    return torch.randn(rows, 1, generator=generator) * spread, torch.randn(rows, generator=generator)


def _foreign() -> dict[str, Any]:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    return {"tm": MulticlassAccuracy(4), "tm matrix": MulticlassConfusionMatrix(4)}


def _ranked() -> dict[str, Any]:
    """Return an object of torchmetrics that keeps all rows."""
    from torchmetrics.regression import SpearmanCorrCoef

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Metric `SpearmanCorrcoef` will save all targets")
        return {"tm rows": SpearmanCorrCoef()}


def _evaluated(rows: int) -> dict[str, Any]:
    px.init()
    found: dict[str, Any] = {}
    named = ["acc1", "acc2", "f1_micro", "f1_macro", "f1_weighted", "precision", "recall", "confusion"]
    wanted = {name: name for name in named} | {"rows": Rows(), **_foreign()}
    found |= px.evaluate(nn.Identity(), _classes(rows, 1), wanted, loss_fn=_losses, batch_size=4)
    out, labels = _numbers(rows, 2)
    regression = {name: name for name in ("mae", "mse", "rmse", "r2")}
    found |= px.evaluate(nn.Identity(), (out, labels), regression, batch_size=4)
    found |= px.evaluate(nn.Flatten(0), (out, labels), _ranked(), batch_size=4)
    score = {"auc": px.AUC(), "auc of bins": px.AUC(bins=64)}
    found |= px.evaluate(nn.Identity(), (out.sigmoid(), labels > 0), score, batch_size=4)
    found["confusion"] = found["confusion"].counts.tolist()
    found |= {name: value.tolist() for name, value in found.items() if isinstance(value, Tensor)}
    return {name: repr(value) for name, value in found.items()}


def _losses(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out * 3, target, reduction="none")


def _evaluated_each() -> list[dict[str, Any]]:
    # 23 rows in batches of 4 leave a rank of 3 one row less; of 2 rows a rank of 3 has none.
    return [_evaluated(23), _evaluated(2)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_n_ranks_give_the_bits_of_one_process(world_size: int) -> None:
    alone = _evaluated_each()
    assert len(alone[0]) == 19
    for found in run_ranks(_evaluated_each, world_size):
        assert found == alone


def _cut_outputs() -> tuple[dict[str, Any], list[int]]:
    """Evaluate a model whose logits are cut over 2 ranks by classes."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    if px.init().world_size > 1:
        model = px.shard(model, {"0": "column", "2": "vocab"}, axis="model")
    strategy = px.DistributedStrategy()
    if px.current().world_size > 1:
        strategy.tensor_parallel = True
        strategy.tensor_parallel_configs = {"tensor_parallel_degree": 2}
    model, _, _ = px.distribute(model, strategy=strategy)
    generator = torch.Generator().manual_seed(5)
    data = torch.randn(11, 6, generator=generator), torch.randint(4, (11,), generator=generator)
    found = px.evaluate(model, data, ["acc1", "f1", "confusion"], batch_size=4)
    with torch.no_grad():
        return {**found, "confusion": found["confusion"].counts.tolist()}, list(model(data[0]).shape)


def test_outputs_that_are_cut_by_classes_are_put_together() -> None:
    alone, shape = _cut_outputs()
    assert shape == [11, 4]
    assert run_ranks(_cut_outputs, 2) == [(alone, [11, 2]), (alone, [11, 2])]


def _other_classes() -> str:
    rank = px.init().rank
    metric = px.ConfusionMatrix()
    metric.update(torch.eye(3 + rank), torch.arange(3 + rank))
    with pytest.raises(ConfigError) as caught:
        metric.compute(AllRanks())
    return str(caught.value)


def test_ranks_that_saw_other_classes_are_told_so() -> None:
    for told in run_ranks(_other_classes, 2):
        assert "ranks saw outputs of [3, 4] classes. Give classes= the largest number." in told
