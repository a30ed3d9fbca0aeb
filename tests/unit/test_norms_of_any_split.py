"""Norms under logical replicas have the same bits however a tensor is split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.step.norms import _norms_of_any_split, _rounded_sums


@given(st.integers(1, 500), st.integers(1, 7), st.integers(-30, 30))
def test_sums_of_parts_add_up_to_the_same_bits(size: int, parts: int, power: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 2.0**power
    top = int(torch.frexp(tensor.abs().max().double().square()).exponent)
    bits = int(torch.frexp(torch.tensor(float(size), dtype=torch.float64)).exponent)
    whole = _rounded_sums(tensor, top, bits)
    split = torch.stack([_rounded_sums(part, top, bits) for part in tensor.tensor_split(parts)])
    assert torch.equal(split.sum(0), whole)
    assert float(whole.sum().sqrt()) == pytest.approx(float(tensor.double().norm()), rel=1e-14)


def test_the_norm_is_as_exact_as_float32_holds() -> None:
    tensors = [torch.randn(1000), torch.zeros(3), torch.tensor([1e-30, 1e30]), torch.zeros(0)]
    norms = _norms_of_any_split(tensors, [()] * len(tensors), torch.float32)
    assert norms.dtype == torch.float32
    for norm, tensor in zip(norms, tensors, strict=True):
        assert float(norm) == pytest.approx(float(tensor.double().norm()), rel=2e-7)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(value: float) -> None:
    (norm,) = _norms_of_any_split([torch.tensor([1.0, value])], [()], torch.float32)
    assert not math.isfinite(norm)
