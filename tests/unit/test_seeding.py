from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from phalanx.data.seeding import seeded


def draws() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), random.random()]


def test_a_block_draws_from_its_seed_alone() -> None:
    with seeded(7):
        first = draws()
    draws()
    with seeded(7):
        again = draws()
    with seeded(8):
        other = draws()
    assert first == again
    assert not set(first) & set(other)


def test_what_follows_a_block_is_as_without_it() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = [draws(), draws()]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    found = [draws()]
    with pytest.raises(ZeroDivisionError), seeded(2**64 - 1):
        _ = draws()[0] / 0
    assert [*found, draws()] == expected


def test_a_block_inside_a_block_leaves_the_outer_one_alone() -> None:
    with seeded(7):
        whole = [draws(), draws()]
    with seeded(7):
        found = [draws()]
        with seeded(9):
            draws()
        assert [*found, draws()] == whole
