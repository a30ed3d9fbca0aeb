"""Logical replicas of context parallel: ranks that compute parts of the same sequences count as one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import phalanx as px
from dist.test_context_parallel import TOKENS, WORDS, Transformer
from ranks import run_ranks

pytestmark = pytest.mark.dist

SAMPLES, GLOBAL, STEPS = 29, 12, 7
"""The last global batch of an epoch has 5 samples."""


def train(replicas: int, degree: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Train on this job's ranks, so many of which compute parts of one sequence; return the parameters."""
    torch.manual_seed(1)
    model = Transformer(dropout=0.2)
    ids = torch.randint(WORDS, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    if degree > 1:
        px.shard(model, {"blocks": "context"})
        settings = {**settings, "hybrid_configs": {"sep_degree": degree}}
    model, optimizer, loader = px.distribute(
        model,
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        torch.utils.data.TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()),
        global_batch=GLOBAL,
        strategy=px.DistributedStrategy(**settings),
        replicas=replicas,
        seed=5,
    )
    updates = 0
    while updates < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            updates += px.has_updated(optimizer)
            if updates == STEPS:
                break
    return dict(model.state_dict())


@pytest.mark.parametrize("replicas", [2, 4])
def test_ranks_that_compute_parts_of_sequences_count_as_one(replicas: int) -> None:
    settings = {"clip": True, "clip_configs": {"norm": 0.5}}
    alone = run_ranks(train, 1, replicas, 1, settings)[0]
    expected, *others = (held for ranks in (2, 4) for held in run_ranks(train, ranks, replicas, 2, settings))
    for held in others:
        for name, value in expected.items():
            assert torch.equal(held[name], value), name
    for name, value in expected.items():  # one process adds up the tokens in another order
        assert (value - alone[name]).norm() <= 1e-4 * alone[name].norm().clamp_min(1e-3), name
