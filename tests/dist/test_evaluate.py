from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.comm import agreement
from phalanx.data import ShardedLoader
from phalanx.errors import ConfigError
from ranks import run_ranks

pytestmark = pytest.mark.dist

ROWS = 23


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(10, (ROWS, 1), generator=generator)


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5))


def _loss(out: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(out, label.squeeze(1))


def _evaluated() -> dict[str, float]:
    phalanx.init()
    return phalanx.evaluate(_model(), _data(), ["acc1", "acc5"], loss_fn=_loss, batch_size=4)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_n_ranks_give_the_metrics_of_one_process(world_size: int) -> None:
    alone = phalanx.evaluate(_model(), _data(), ["acc1", "acc5"], loss_fn=_loss, batch_size=4)
    for found in run_ranks(_evaluated, world_size):
        assert found["acc1"] == alone["acc1"]
        assert found["acc5"] == alone["acc5"]
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def _batch_metrics() -> list[tuple[float, float, float]]:
    phalanx.init()
    model = _model().eval()
    seen = []
    for x, y in ShardedLoader(_data(), global_batch=11, shuffle=False):
        out = model(x)
        loss = phalanx.global_mean(_loss(out, y))
        seen.append((loss.item(), phalanx.accuracy(out, y).item(), phalanx.accuracy(out, y, k=5).item()))
    after_the_loop = phalanx.global_mean(_loss(out, y)).item()
    assert after_the_loop == pytest.approx(seen[-1][0], rel=1e-6)
    return seen


def test_metrics_of_a_batch_are_those_of_the_global_one() -> None:
    alone = _batch_metrics()
    # The last batch holds one row: two of the three ranks only keep step.
    for found in run_ranks(_batch_metrics, 3):
        assert len(found) == len(alone) == 3
        for ours, reference in zip(found, alone, strict=True):
            assert ours == pytest.approx(reference, rel=1e-6)


def _evaluated_on_rank_0_alone() -> None:
    if phalanx.init().rank == 0:
        agreement.SAY_EVERY_S = 0.2
        phalanx.evaluate(_model(), _data())


def test_a_rank_that_evaluates_alone_is_told_which_one_left() -> None:
    alone, other = run_ranks(_evaluated_on_rank_0_alone, 2, expect_failure=True)
    assert not other.failed
    assert alone.error_type == "PeerLostError"
    assert re.search(r"for rank 1 \(host .*\), which did not come to 'evaluate'\. It has ended: its log", alone.message)
    assert "look for an `if rank == ...` around this one" in alone.message


def _evaluated_beside_training() -> list[str]:
    rank = phalanx.init().rank
    told = []
    for call in (
        lambda: phalanx.evaluate(_model(), _data()) if rank else phalanx.distribute(_model()),
        lambda: phalanx.evaluate(_model(), _data(), ["acc5" if rank else "acc1"]),
        lambda: phalanx.evaluate(_model(), tuple(part[rank:] for part in _data())),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_ranks_that_do_not_evaluate_alike_are_told_so() -> None:
    first, second = run_ranks(_evaluated_beside_training, 2)
    assert first == second
    assert "different points of the script: data on rank 0; evaluate on rank 1" in first[0]
    assert "evaluate.metrics[0] must be the same on all ranks, found acc1 on rank 0; acc5 on rank 1" in first[1]
    assert "evaluate.rows must be the same on all ranks, found 23 on rank 0; 22 on rank 1" in first[2]
