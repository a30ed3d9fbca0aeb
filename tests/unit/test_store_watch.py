"""`StoreWatch` counts looks in a row at which the store had not answered."""

from __future__ import annotations

import time

import pytest

from phalanx.launch.process.store_watch import StoreWatch


@pytest.mark.parametrize(
    ("answers", "looks"),
    [
        ([], 5),  # the first finds what was answered before
        ([1, 2, 3], 7),
        ([4], 8),
        ([5], 9),
        ([6], 5),  # too late
        ([3, 6, 9, 12], 16),
    ],
)
def test_four_looks_in_a_row_without_an_answer_are_silence(
    monkeypatch: pytest.MonkeyPatch, answers: list[int], looks: int
) -> None:
    calls, slept = [], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) in answers:
            watch.note_answer()

    monkeypatch.setattr(time, "sleep", sleep)
    watch = StoreWatch(lambda: calls.append(len(slept)), silence_s=2.0, look_s=0.5)
    watch._look()
    assert calls == [looks]
    assert set(slept) == {0.5}
