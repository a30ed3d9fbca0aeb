"""Groups of ranks that compute a share of each batch together continue as logical replicas on fewer groups."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from dist.test_context_parallel import TOKENS, WORDS, Transformer
from dist.test_logical_replicas import Blocks
from dist.test_pipeline_replicas import net
from phalanx.plan import Plan
from phalanx.plan.value import Axis, ModuleRule, ParamRule, Schedule, Step
from phalanx.strategy import DistributedStrategy
from ranks import run_ranks

pytestmark = pytest.mark.dist

GROUP, GLOBAL, SAMPLES = 2, 12, 55
"""Ranks of a group; the last global batch of an epoch has 7 samples, 4 for one group and 3 for the other."""


def tensor_parallel() -> tuple[nn.Module, Any, Any]:
    x = torch.randint(0, 24, (SAMPLES, 5), generator=torch.Generator().manual_seed(0))
    model = Blocks()
    px.shard(model, {"embed": "vocab", "first": "column", "second": "row"})
    strategy = DistributedStrategy(
        tensor_parallel=True, hybrid_configs={"mp_degree": GROUP}, clip=True, clip_configs={"norm": 0.5}
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(x, x % 8)
    return px.distribute(model, optimizer, data, global_batch=GLOBAL, strategy=strategy, seed=5)


def context_parallel() -> tuple[nn.Module, Any, Any]:
    ids = torch.randint(WORDS, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    model = Transformer(dropout=0.2)
    px.shard(model, {"blocks": "context"})
    data = torch.utils.data.TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    strategy = DistributedStrategy(hybrid_configs={"sep_degree": GROUP})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return px.distribute(model, optimizer, data, global_batch=GLOBAL, strategy=strategy, seed=5)


def pipeline() -> tuple[nn.Module, Any, Any]:
    groups, model, generator = px.init().world_size // GROUP, net(), torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, 6, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    axes = (Axis(name="data", size=groups),) * (groups > 1)
    plan = Plan(
        mesh=(*axes, Axis(name="stage", size=GROUP)),
        params=(ParamRule(match="*"),),
        modules=tuple(ModuleRule(match=str(index), stage=int(index >= 4)) for index in range(9)),
        schedule=Schedule(kind="1f1b", microbatches=2),
        step=Step(batch_axes=("data",) * (groups > 1)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return px.distribute(
        model, optimizer, torch.utils.data.TensorDataset(*data), global_batch=GLOBAL, plan=plan, seed=5
    )


def without_groups() -> tuple[nn.Module, Any, Any]:
    x = torch.randint(0, 24, (SAMPLES, 5), generator=torch.Generator().manual_seed(0))
    model = Blocks()
    data = torch.utils.data.TensorDataset(x, x % 8)
    return px.distribute(model, torch.optim.AdamW(model.parameters(), 0.01), data, global_batch=GLOBAL, seed=5)


KINDS = {build.__name__: build for build in (tensor_parallel, context_parallel, pipeline)}


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if output.dim() == 3 and output.shape[:2] == target.shape:
        output = output.transpose(1, 2)
    return F.cross_entropy(output, target)


def train(kind: str, folder: Path, updates: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Resume if there is a checkpoint, train, save; return what this rank holds, and what loading said."""
    torch.manual_seed(1)
    model, optimizer, loader = (KINDS | {"without_groups": without_groups})[kind]()
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx.parallel").addHandler(handler)
    checkpointer = px.Checkpointer(folder, model, optimizer, loader)
    checkpointer.resume()
    step = px.train_step(model, F.cross_entropy, optimizer) if kind == "pipeline" else None
    last = checkpointer.steps + updates
    while checkpointer.steps < last:
        for x, y in loader:
            if step is not None:
                step(x, y)
            else:
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
            checkpointer.step()
            if checkpointer.steps == last:
                checkpointer.save()
                break
    checkpointer.close()
    held = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
    return held, [line for line in lines if "was trained with" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_two_groups_go_on_as_one_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    undisturbed = run_ranks(partial(train, kind, tmp_path / "undisturbed", 9), 2 * GROUP)
    run_ranks(partial(train, kind, tmp_path / "disturbed", 3), 2 * GROUP)
    resumed = run_ranks(partial(train, kind, tmp_path / "disturbed", 4), GROUP)
    (line,) = resumed[0][1]
    assert line.endswith("continuing with logical_replicas=2 on 1 rank; logical_replicas=0 turns it off")
    again = run_ranks(partial(train, kind, tmp_path / "disturbed", 2), 2 * GROUP)
    for rank, (held, _) in enumerate(undisturbed):
        for name, value in held.items():
            if value.is_floating_point():  # numbers of micro-batches are those of the first replica
                assert torch.equal(value, again[rank][0][name]), name


def test_ranks_do_not_go_on_as_groups_of_ranks(tmp_path: Path) -> None:
    run_ranks(partial(train, "without_groups", tmp_path, 3), 2 * GROUP)
    (line,) = run_ranks(partial(train, "tensor_parallel", tmp_path, 2), GROUP)[0][1]
    assert line.endswith("for each share of a batch was computed by 1 rank, and is by 2 now")
