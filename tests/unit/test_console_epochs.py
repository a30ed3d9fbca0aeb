"""Changes of the members of a job, and what ranks reported last, on its page, from files that any script may write."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.ui.pages import _columns, _epoch, _last_report

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


def test_the_last_report_of_a_balanced_rank_shows_its_share_when_the_split_changed_since() -> None:
    report = {"time": 1.0, "step": 20, "share": 0.75, "ms_per_sample": 1.25, "loss": 0.5}
    change = {"time": 2.0, "kind": "balance", "unit": "samples", "before": [8, 8], "after": [12, 4]}
    assert _last_report([{"step": 10}, report, change]) == report
    assert _columns([report]) == ["loss", "samples_per_s", "share", "ms_per_sample"]
    assert _last_report([change]) is None
