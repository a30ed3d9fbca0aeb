"""What the entry looks at when a script has ended."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from phalanx.launch import entry


def torch_on(card: int, initialized: bool = True) -> SimpleNamespace:
    cuda = SimpleNamespace(is_initialized=lambda: initialized, current_device=lambda: card)
    return SimpleNamespace(cuda=cuda)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("FLAGS_selected_gpus", "6")
    # The launcher may have been configured in this process, which stops propagation.
    monkeypatch.setattr(logging.getLogger("phalanx"), "propagate", True)
    return caplog


def test_a_set_device_to_another_ranks_card_warns(second_of_two: pytest.LogCaptureFixture) -> None:
    entry._check_card(torch_on(0))
    assert "computed on card 4, but the launcher gave it 6. Choose cards with --gpus" in second_of_two.text


@pytest.mark.parametrize("torch", [torch_on(1), torch_on(0, initialized=False), None])
def test_the_own_card_and_no_card_at_all_are_fine(second_of_two: pytest.LogCaptureFixture, torch: object) -> None:
    entry._check_card(torch)
    assert second_of_two.text == ""
