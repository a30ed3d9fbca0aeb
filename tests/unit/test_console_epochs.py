"""Changes of the members of a job on its page, from files that any script may write."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.ui.pages.job_page import _epoch

CHANGE = {"kind": "epoch", "epoch": 3, "step": 7, "ranks": 2, "reason": "n0.1 joins", "redone": 1, "time": 1.0}


def test_a_change_is_shown_with_its_longest_standstill() -> None:
    shown = {name: CHANGE[name] for name in ("epoch", "step", "ranks", "reason", "redone")}
    assert _epoch({**CHANGE, "seconds": {"n0.0": 0.25, "n0.1": 2}}) == {**shown, "stall_s": 2}
    assert _epoch(CHANGE) == {**shown, "stall_s": None}


@pytest.mark.parametrize(
    "more",
    [{"kind": "step"}, {"epoch": "3"}, {"seconds": [1, 2]}, {"seconds": 3}, {"seconds": {"a": "x"}}, {"seconds": None}],
)
def test_what_is_no_change_is_not_shown(more: dict[str, Any]) -> None:
    assert _epoch({**CHANGE, **more}) is None
