"""The soak benchmark draws jobs until there were enough faults, or no more come about."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import __main__ as soak_main
from benchmarks.soak.__main__ import MOST_IDLE, Soak
from benchmarks.soak.result import SoakResult


def soak_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faults_by_job: list[int], wanted: int) -> Soak:
    left = list(faults_by_job)

    def job(_: Path, seed: int) -> SoakResult:
        return SoakResult("job", seed, ["fault"] * left.pop(0), [], 0.0, "")

    monkeypatch.setattr(soak_main, "jobs_of", lambda _: {"job": (1, job)})
    return Soak(tmp_path, 1, wanted, "")


def test_jobs_that_come_to_no_fault_end_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    soak = soak_of(monkeypatch, tmp_path, [1] + [0] * (MOST_IDLE - 1) + [1] + [0] * 2 * MOST_IDLE, 5)
    soak.work()
    assert soak.is_in_vain
    assert soak.faults == 2
    assert len(soak.results) == 2 * MOST_IDLE + 1


def test_enough_faults_end_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    soak = soak_of(monkeypatch, tmp_path, [2, 0, 3, 1], 5)
    soak.work()
    assert not soak.is_in_vain
    assert soak.faults == 5
