"""`check_nan_inf`: all ranks end with the same error, which names where NaN or infinity came from."""

from __future__ import annotations

import pytest
import torch

from benchmarks.wrong_numbers import NOT_FINITE, WrongNumber
from benchmarks.wrong_numbers_rank import Job
from phalanx.errors import NotFiniteError
from phalanx.parallel.numerics.nan_check import _are_finite, check_nan_inf
from phalanx.strategy import DistributedStrategy
from ranks import run_ranks

pytestmark = pytest.mark.dist


def train_checked(fault: str, engine: str) -> str:
    check_nan_inf()
    try:
        Job(fault, engine).run(8)
    except NotFiniteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fault", NOT_FINITE, ids=lambda fault: f"{fault.name}, {fault.engine}")
def test_the_origin_is_named_alike_on_all_ranks(fault: WrongNumber, ranks: int) -> None:
    messages = set(run_ranks(train_checked, ranks, fault.name, fault.engine))
    assert len(messages) == 1, messages
    message = messages.pop()
    assert fault.cause in message, message
    assert fault.tensor in message, message
    assert not fault.step or message.startswith(f"step {fault.step}:"), message


def train_sharded(fault: str, stage: int) -> str:
    settings = {"sharding": True, "sharding_configs": {"stage": stage}}
    try:
        Job(fault, "px", strategy=DistributedStrategy(check_nan_inf=True, **settings)).run(8)
    except NotFiniteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan deep inside", "NaN first appeared on rank 0 in an output of module deep (Deep)"),
        ("inf in one sample", "on rank 1 in input 0 of the model, for sample 37 of the dataset"),
        ("nan in backward", "in the gradient of first.weight. The step could not be computed again"),
    ],
)
def test_sharded_ranks_of_which_one_sees_it_all_say_the_same(fault: str, message: str) -> None:
    (words,) = set(run_ranks(train_sharded, 2, fault, 3))
    assert message in words


def test_numbers_whose_sum_is_too_large_are_finite() -> None:
    large = torch.full((100,), 3e38)
    assert _are_finite([large, -large, torch.full((9,), 6e4, dtype=torch.float16)])
    assert not _are_finite([large, torch.tensor([1.0, torch.nan])])
    assert not _are_finite([torch.tensor([torch.inf, -torch.inf])])


@pytest.mark.parametrize("engine", ["loop", "ddp", "px"])
def test_a_finite_training_goes_on(engine: str) -> None:
    assert run_ranks(train_checked, 2, "", engine) == ["", ""]
