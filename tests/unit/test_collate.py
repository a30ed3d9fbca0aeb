from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from phalanx.data.samples.batch import collate

Pair = namedtuple("Pair", "x y")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.zeros(2), 1), (torch.ones(2), 2)],
        [(torch.zeros(2), 1.5, True), (torch.ones(2), 2, False)],
        [(np.zeros(2), np.int32(1), "a"), (np.ones(2), np.int32(2), "b")],
        [({"a": 1}, [torch.ones(1)]), ({"a": 2}, [torch.zeros(1)])],
        [(torch.nn.Parameter(torch.ones(2)), -(2**63)), (torch.ones(2), 2**63 - 1)],
        [[torch.zeros(1), 1], [torch.ones(1), 2]],
        [Pair(torch.zeros(1), 1), Pair(torch.ones(1), 2)],
        [{"x": 1}, {"x": 2}],
        [1, 2],
    ],
)
def test_a_batch_is_what_torch_makes(samples: list[Any]) -> None:
    assert same(collate(samples), default_collate(samples))


@pytest.mark.parametrize("samples", [[(1, 2), (1,)], [(torch.zeros(1), 1), (torch.zeros(2), 1)], [(1,), [1, 2]]])
def test_samples_that_do_not_fit_are_an_error_as_in_torch(samples: list[Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        collate(samples)
