from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch

from phalanx.data.sampling import python_state
from phalanx.data.sampling.seeding import seeded


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


@pytest.mark.parametrize("warm_up", [0, 1, 623, 624, 625])
def test_the_state_of_pythons_generator_is_put_back_wherever_it_was(warm_up: int) -> None:
    random.seed(5)
    for _ in range(warm_up):
        random.getrandbits(32)
    random.gauss(0, 1)  # leaves a second normal number for the next call
    wanted = random.getstate()
    with seeded(1):
        random.gauss(0, 1)
    assert random.getstate() == wanted


def test_states_read_as_memory_are_those_python_tells() -> None:
    read, put_back = python_state._as_memory(random.seed.__self__)
    random.seed(11)
    state, told = read(), random.getstate()
    expected = [random.gauss(0, 1) for _ in range(700)]
    put_back(state)
    assert random.getstate() == told
    assert [random.gauss(0, 1) for _ in range(700)] == expected


def test_another_python_keeps_to_what_the_language_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.implementation, "name", "another")
    assert python_state._functions() == (random.getstate, random.setstate)
