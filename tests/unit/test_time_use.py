"""What a rank counts of its own time: input and collector; and what asks for it shows."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, dataloader

from phalanx.comm.batch.input_time import InputTime, input_time
from phalanx.launch.cli.why_command import render
from phalanx.launch.hang.locations import Location
from phalanx.launch.hang.observe import Observation
from phalanx.launch.job import registry
from phalanx.launch.rank.time_use import TimeUse


class Clock:
    """Stands still but for what a test lets pass: on a busy machine a sleep takes longer than it says."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def thread_time(self) -> float:
        return self.cpu_seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds

    def work(self, seconds: float) -> None:
        self.seconds += seconds
        self.cpu_seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("phalanx.comm.batch.input_time.time", clock)
    return clock


class SlowSamples(Dataset[int]):
    """Each takes a quarter of a second on the disk, and as long to decode."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.clock.wait(0.25)
        self.clock.work(0.25)
        return index


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[TimeUse]:
    monkeypatch.setattr(dataloader._BaseDataLoaderIter, "__next__", dataloader._BaseDataLoaderIter.__next__)
    before, counts = list(gc.callbacks), TimeUse()
    counts.begin()
    yield counts
    gc.callbacks[:] = before


def test_the_time_in_a_loader_counts_and_what_it_only_waits_is_told_apart(counting: TimeUse, clock: Clock) -> None:
    before = input_time.seconds, input_time.cpu_seconds
    for _ in DataLoader(SlowSamples(clock), batch_size=2):
        clock.work(8.0)  # a step
    assert input_time.seconds - before[0] == pytest.approx(2.0)
    assert input_time.cpu_seconds - before[1] == pytest.approx(1.0)
    assert counting.read({})["input_s"] == round(input_time.seconds, 4)


def test_a_loader_in_a_loader_counts_once_and_one_of_another_thread_not_at_all(clock: Clock) -> None:
    times = InputTime()
    with times, times:
        clock.wait(2.0)
    assert times.seconds == 2.0

    def load() -> None:
        with times:
            clock.wait(5.0)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert times.seconds == 2.0


def test_collections_count(counting: TimeUse) -> None:
    junk: Any = [[] for _ in range(100_000)]
    gc.collect()
    assert counting.read({})["collector_s"] > 0.0005
    assert len(junk) == 100_000


class Group:
    """A group that says what it waited for."""

    def __init__(self, *times: float) -> None:
        self.times = times

    def wait_times(self) -> tuple[float, list[float], list[float]]:
        return 2 * sum(self.times), list(self.times), list(self.times)


def test_waits_of_groups_are_by_global_rank_and_stay_when_a_group_ends() -> None:
    counts = TimeUse()
    assert counts.read({"1": (Group(0.0, 2.0), (4, 7))})["main_waits_s"] == {"7": 2.0}
    again = Group(0.0, 0.5)  # of the same name, made anew
    assert counts.read({"1": (again, (4, 7))})["main_waits_s"] == {"7": 2.5}
    again.times = (0.0, 0.75)
    fields = counts.read({"1": (again, (4, 7)), "2": (Group(1.0, 0.0), (4, 5))})
    assert fields["main_waits_s"] == fields["entered_waits_s"] == {"7": 2.75, "4": 1.0}
    assert fields["in_calls_s"] == 7.5


def test_a_slow_rank_is_shown_to_whoever_lists_or_asks() -> None:
    line = "rank 0 waited 412 s an hour for rank 1 (11% of the time): it slept 30% of the time"
    job = {
        "job_id": "3f",
        "script": "train.py",
        "mode": "collective",
        "pid": 4,
        "age_s": 60,
        "processes": [],
        "slow": [line],
    }
    assert f"\n  slow: {line}\n" in registry.render([job])
    seen = Observation(title="rank 0", role="worker", pid=5, location=Location(kind="unknown"), at=0.0)
    assert render([seen], None, [line]).startswith(f"the job is not hung, but slow. In the last minute:\n{line}\n\n")
    assert render([seen], None).startswith("no rank is seen to wait for another")
