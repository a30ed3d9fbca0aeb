"""Checksums tell tensors apart by their bits, wherever they lie and however they are laid out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.parallel.checks import checksum as digest
from phalanx.parallel.checks.checksum import checksum, checksums, combined


def numbers(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", [1, 5, 16384, 16385, 300_000])
def test_any_change_of_an_element_shows(count: int) -> None:
    tensor = numbers(count)
    found = {checksum(tensor).item()}
    for change in (lambda x: -x, torch.nextafter, lambda x: x + 0.5):
        for place in {0, count // 2, count - 1}:
            other = tensor.clone()
            other[place] = (
                change(other[place], torch.tensor(9.0)) if change is torch.nextafter else change(other[place])
            )
            found.add(checksum(other).item())
    assert len(found) == 1 + 3 * len({0, count // 2, count - 1})
    assert checksum(-tensor) != checksum(tensor)
    assert count == 1 or checksum(tensor.flip(0)) != checksum(tensor)


def test_strides_and_offsets_do_not_matter_and_every_dtype_has_a_checksum() -> None:
    tensor = numbers(60).view(6, 10)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(torch.cat([torch.zeros(3), tensor.view(-1)])[3:]) == checksum(tensor)
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.complex64):
        ones = torch.ones(7, 3).to(dtype)
        other = ones.clone()
        other[3, 1] = 0
        assert checksum(ones) != checksum(other)
        assert checksum(ones.view(-1)[1:]) == checksum(ones.view(-1)[1:].clone())
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(())) == 0


def test_the_arithmetic_is_that_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, halves = numbers(300_000), numbers(70_000).bfloat16()
    here = checksums({"whole": tensor, "halves": halves})
    monkeypatch.setattr(digest, "_products", lambda blocks, factors: torch.cat([*(blocks * factors).sum(1, True)]))
    assert checksums({"whole": tensor, "halves": halves}) == here


def test_names_count_too() -> None:
    assert combined({"a": 1, "b": 2}) != combined({"b": 1, "a": 2})
    assert checksums({}) == {}
