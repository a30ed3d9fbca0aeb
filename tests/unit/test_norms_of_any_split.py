"""Norms under logical replicas have the same bits however a tensor is split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.parallel.step.norms import _norms_of_any_split
from phalanx.parallel.step.square_sums import SquareSums
from phalanx.versions import HAS_NATIVE

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


def numbers(size: int, power: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 2.0**power).to(dtype)


def sums_of(tensors: list[Tensor], whole: list[Tensor], *, native: bool) -> Tensor:
    """Return the sums of parts of tensors, by the magnitudes and counts of whole ones."""
    largest, counts = SquareSums(whole, native=native).largest(), SquareSums(whole, native=native).counts()
    return SquareSums(tensors, native=native).rounded(largest, counts)


@given(st.integers(1, 500), st.integers(1, 7), st.integers(-30, 30), st.sampled_from([False, HAS_NATIVE]))
def test_sums_of_parts_add_up_to_the_same_bits(size: int, parts: int, power: int, native: bool) -> None:
    tensor = numbers(size, power)
    whole = sums_of([tensor], [tensor], native=native)
    split = [sums_of([part], [tensor], native=native) for part in tensor.tensor_split(parts)]
    assert torch.equal(torch.stack(split).sum(0), whole)
    assert float(whole.sum().sqrt()) == pytest.approx(float(tensor.double().norm()), rel=1e-14)


@pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not built")
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 7, 8, 9, 1000]), st.integers(-40, 40)), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_the_native_sums_have_the_bits_of_torch(
    shapes: list[tuple[int, int]], dtype: torch.dtype, is_strided: bool
) -> None:
    tensors = [numbers(size, power if dtype is not torch.float16 else power // 4, dtype) for size, power in shapes]
    tensors = [tensor[::2] if is_strided else tensor for tensor in tensors]
    assert torch.equal(SquareSums(tensors, native=True).largest(), SquareSums(tensors, native=False).largest())
    assert torch.equal(sums_of(tensors, tensors, native=True), sums_of(tensors, tensors, native=False))


@pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not built")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_native_sums_are_the_same_with_several_threads(dtype: torch.dtype) -> None:
    tensors, before = (
        [numbers(700_001, 2, dtype), numbers(5, 2, dtype), numbers(300_000, -3, dtype)],
        torch.get_num_threads(),
    )
    try:
        torch.set_num_threads(1)
        alone = sums_of(tensors, tensors, native=True)
        torch.set_num_threads(3)
        assert torch.equal(sums_of(tensors, tensors, native=True), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("native", [False, HAS_NATIVE])
@pytest.mark.parametrize("value", [5e-324, 1e-310, 1e-160, 1e-154, 1e150, 1e153])
def test_sums_of_the_smallest_and_largest_numbers_are_exact(value: float, native: bool) -> None:
    tensor = torch.tensor([value, -value / 2, value / 3, 0.0], dtype=torch.float64)
    whole = sums_of([tensor], [tensor], native=native)
    split = [sums_of([part], [tensor], native=native) for part in tensor.split(1)]
    assert torch.equal(torch.stack(split).sum(0), whole)
    assert float(whole.sum()) == pytest.approx(math.fsum(tensor.square().tolist()), rel=1e-14)


class Subclass(Tensor):
    """May stand for a tensor that is elsewhere, and have no memory of its own."""


def test_subclasses_of_tensors_are_added_up_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [numbers(100, 0), numbers(7, 3)]
    expected = sums_of(tensors, tensors, native=False)
    monkeypatch.setattr(Subclass, "data_ptr", None)  # an address that is asked for is an error
    subclassed = [tensor.as_subclass(Subclass) for tensor in tensors]  # type: ignore[type-var]
    assert torch.equal(sums_of(subclassed, subclassed, native=True).as_subclass(Tensor), expected)


def test_the_norm_is_as_exact_as_float32_holds() -> None:
    tensors = [torch.randn(1000), torch.zeros(3), torch.tensor([1e-30, 1e30]), torch.zeros(0)]
    norms = _norms_of_any_split(tensors, [()] * len(tensors), torch.float32)
    assert norms.dtype == torch.float32
    for norm, tensor in zip(norms, tensors, strict=True):
        assert float(norm) == pytest.approx(float(tensor.double().norm()), rel=2e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_what_is_not_finite_stays_so(value: float, dtype: torch.dtype) -> None:
    (norm,) = _norms_of_any_split([torch.tensor([1.0, value], dtype=dtype)], [()], torch.float32)
    assert norm == math.inf


def test_a_norm_whose_square_is_beyond_float64_is_infinite() -> None:
    (norm,) = _norms_of_any_split([torch.full((8,), 1e200, dtype=torch.float64)], [()], torch.float64)
    assert norm == math.inf
