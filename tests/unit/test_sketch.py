"""Sketches: distances, linear combinations and single differences of tensors from a few numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.parallel.observe.sketch import NOT_FINITE, digest, distance, norm, single_difference, sketch


@pytest.mark.parametrize("size", [1, 5, 64, 1000, 200_003])
def test_norms_are_exact_and_distances_near(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    first, second = (torch.randn(size, generator=generator) for _ in range(2))
    assert norm(sketch(first)) == pytest.approx(first.double().norm().item(), rel=1e-12)
    apart = (first - second).double().norm().item()
    assert distance(sketch(first), sketch(second)) == pytest.approx(apart, rel=0.4 if size > 64 else 1e-6)


def test_a_sketch_of_a_mean_is_the_mean_of_the_sketches() -> None:
    parts = [torch.randn(70_001, dtype=torch.float64) for _ in range(3)]
    mean = np.mean([sketch(part)[:66] for part in parts], axis=0)
    assert np.allclose(sketch(torch.stack(parts).mean(0))[:66], mean, atol=1e-6)


@pytest.mark.parametrize("index", [0, 63, 64, 65_535, 65_536, 150_000])
def test_a_single_entry_that_differs_is_named(index: int) -> None:
    first = torch.randn(150_001, generator=torch.Generator().manual_seed(0))
    second = first.clone()
    second.view(torch.int32)[index] ^= 1 << 22
    found_at = single_difference(sketch(second), sketch(first), first.numel())
    assert found_at is not None
    assert found_at[0] == index
    assert found_at[1] == pytest.approx((second[index] - first[index]).item(), rel=1e-3)


def test_two_entries_that_differ_are_not_taken_for_one() -> None:
    first = torch.randn(500, generator=torch.Generator().manual_seed(0))
    second = first.clone()
    second[3] += 1.0
    second[5] += 1.0
    assert single_difference(sketch(second), sketch(first), 500) is None


def test_numbers_that_are_not_finite_are_counted_and_left_out() -> None:
    values = sketch(torch.tensor([1.0, torch.nan, torch.inf, 2.0]))
    assert values[NOT_FINITE] == 2
    assert norm(values) == pytest.approx(5**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_every_kind_of_number_has_one(dtype: torch.dtype) -> None:
    tensor = torch.randn(10, 7).to(dtype).t()
    assert norm(sketch(tensor)) == pytest.approx(tensor.abs().double().norm().item(), rel=1e-3)
    assert digest(tensor) == digest(tensor.clone(memory_format=torch.contiguous_format)) != digest(tensor * 2)
