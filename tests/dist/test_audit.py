"""`strategy.audit`: another rank computes a replica again; other bits end all ranks, and name the one at fault."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phalanx as px
from benchmarks.wrong_numbers_rank import Job
from fake_launcher import FakeLauncher
from phalanx.errors import ConfigError, CorruptionError
from phalanx.parallel.numerics.audit import choose_audited
from phalanx.parallel.session import model_record
from phalanx.strategy import DistributedStrategy
from ranks import run_ranks

pytestmark = pytest.mark.dist


def train_audited(fault: str, replicas: int, audit: float) -> str | int:
    job = Job(fault, "px", strategy=DistributedStrategy(logical_replicas=replicas, audit=audit))
    try:
        job.run(5)
    except CorruptionError as error:
        return str(error)
    audited = model_record(job.net).audit
    assert audited is not None
    return audited.audited


@pytest.mark.parametrize(("fault", "replicas"), [("", 2), ("dropout", 5), ("batch norm", 3)])
def test_replicas_have_the_same_bits_on_another_rank(fault: str, replicas: int) -> None:
    assert run_ranks(train_audited, 2, fault, replicas, 1.0) == [5, 5]


def test_a_flipped_bit_names_rank_replica_parameter_and_step() -> None:
    (message,) = set(run_ranks(train_audited, 2, "flipped bit of a replica", 3, 1.0))
    assert isinstance(message, str)
    assert message.startswith("step 2: the gradients of replica 2, held by rank 1, had other bits"), message
    assert "second.weight. Rank 1 computed it wrong the first time" in message


def audit_penalty() -> str:
    job = Job("penalty", "px", strategy=DistributedStrategy(logical_replicas=2, audit=1.0))
    with pytest.raises(ConfigError) as caught:
        job.run(2)
    return str(caught.value)


def test_a_loss_that_takes_weights_is_no_corruption() -> None:
    (message,) = set(run_ranks(audit_penalty, 2))
    assert "head.weight. strategy.audit needs a model that is called once for each batch" in message


def refused(replicas: int | None) -> str:
    px.init()
    with pytest.raises(ConfigError) as caught:
        Job("", "px", strategy=DistributedStrategy(logical_replicas=replicas, audit=0.5)).run(1)
    return str(caught.value)


def test_without_replicas_or_ranks_it_is_an_error() -> None:
    assert "and there are none. Set strategy.logical_replicas" in run_ranks(refused, 2, None)[0]
    assert "and there is one rank" in run_ranks(refused, 1, 2)[0]


class Draws(nn.Module):
    """Draws from the generators of Python, NumPy and torch in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        drawn = random.random() + float(np.random.rand()) + random.gauss(0.0, 1.0)
        output: Tensor = self.layer(nn.functional.dropout(x, 0.5)) * drawn
        return output


def audit_draws() -> int:
    torch.manual_seed(0)
    net = Draws()
    strategy = DistributedStrategy(logical_replicas=3, audit=1.0)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
    model, optimizer, loader = px.distribute(
        net, torch.optim.SGD(net.parameters(), lr=0.1), data, global_batch=6, strategy=strategy
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    audited = model_record(net).audit
    assert audited is not None
    return audited.audited


def test_a_model_that_draws_from_python_and_numpy_computes_the_same_again() -> None:
    assert run_ranks(audit_draws, 2) == [4, 4]


def refused_synchronised() -> str:
    px.init()
    strategy = DistributedStrategy(audit=0.5, logical_replicas=2, sync_batch_norm=True)
    with pytest.raises(ConfigError) as caught:
        Job("batch norm", "px", strategy=strategy).run(1)
    return str(caught.value)


def test_what_a_rank_cannot_compute_alone_is_refused() -> None:
    (message,) = set(run_ranks(refused_synchronised, 2))
    assert "and its batch norms are synchronised. Set strategy.logical_replicas" in message


def refused_elastic() -> str:
    with pytest.raises(ConfigError) as caught:
        Job("", "px", strategy=DistributedStrategy(audit=0.5, logical_replicas=4)).run(1)
    return str(caught.value)


def test_an_elastic_job_is_refused() -> None:
    messages = set(FakeLauncher(refused_elastic, members=2, env={"PHALANX_REPLICAS": "4"}).run().values())
    assert len(messages) == 1
    assert "and ranks of this job may leave and join" in messages.pop()


def test_the_chosen_part_of_the_updates_is_spread_over_replicas_and_ranks() -> None:
    assignment = (range(2), range(2, 3), range(3, 5))
    choices = [choose_audited(update, 0.1, assignment) for update in range(20_000)]
    chosen = [choice for choice in choices if choice is not None]
    assert 0.09 < len(chosen) / len(choices) < 0.11
    assert {choice.replica for choice in chosen} == set(range(5))
    assert all(choice.replica in assignment[choice.owner] and choice.auditor != choice.owner for choice in chosen)
    assert {choice.auditor for choice in chosen} == {0, 1, 2}
