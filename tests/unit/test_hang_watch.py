"""The watch for hangs of one host among several: when a report is over, and who counts as at work."""

from __future__ import annotations

import os
import time
from typing import Any

from phalanx.launch.hang.observe import Watched
from phalanx.launch.hang.verdict import Verdict
from phalanx.launch.hang.watch import HangNews, HangSettings, HangWatch

REPORTED = Verdict(
    cause="rank",
    culprits=("rank 0",),
    lines=("rank 0 is elsewhere",),
    waited_s=10.0,
    works=False,
    is_certain=False,
    waiting={"rank 1": ()},
)


class Link:
    """Launchers of other hosts, of which this one asks for looks."""

    def __init__(self) -> None:
        self.asked = 0
        self.published: list[tuple[int, dict[str, Any]]] = []

    def request_probe(self) -> None:
        self.asked += 1

    def publish_probe(self, number: int, observed: dict[str, Any]) -> None:
        self.published.append((number, observed))


def watch_of(link: Link | None, title: str) -> HangWatch:
    watch = HangWatch(HangSettings(after_s=0.0, timeout_s=0.0), link, "host1")
    watch.watch([Watched(title=title, role="worker", pid=os.getpid())])
    watch.settings = HangSettings(after_s=60.0, timeout_s=0.0)  # the test ticks itself
    watch._reported = REPORTED
    return watch


def kinds(watch: HangWatch) -> list[str]:
    news: list[HangNews] = []
    while (one := watch.take()) is not None:
        news.append(one)
    return [one.kind for one in news]


def test_a_host_whose_ranks_take_no_part_learns_from_the_others_that_the_job_makes_progress() -> None:
    link = Link()
    watch = watch_of(link, "rank 2")
    watch._tick(1.0)
    watch._tick(1.0)
    assert (link.asked, kinds(watch)) == (1, [])
    everywhere: dict[str, Any] = {"everywhere": []}
    watch.receive_probe(everywhere)
    watch._tick(1.0)
    assert kinds(watch) == ["resumed"]
    assert watch._reported is None


def test_a_host_that_does_not_watch_lets_no_other_wait_for_what_it_sees() -> None:
    link = Link()
    watch = HangWatch(HangSettings(after_s=0.0, timeout_s=0.0), link, "host1")
    watch.receive_probe({"probe": 3})
    watch.receive_probe({"probe": 3, "everywhere": []})
    ((number, observed),) = link.published
    assert (number, observed["processes"]) == (3, [])
    assert watch._heard.empty()


def test_a_report_is_over_when_its_ranks_have_left_the_job() -> None:
    watch = watch_of(None, "rank 2")
    watch._tick(1.0)
    assert kinds(watch) == ["resumed"]


def test_processes_that_are_watched_again_are_not_late_for_what_they_waited_before() -> None:
    watch = watch_of(None, "rank 2")
    assert watch._next_probe < time.monotonic() + 1.0
    watch.watch([])
    watch.watch([Watched(title="rank 2", role="worker", pid=os.getpid())])
    assert watch._next_probe > time.monotonic() + 50.0


def test_a_process_whose_rank_changed_is_watched_under_its_new_one() -> None:
    watch = watch_of(None, "rank 2")
    watch.watch([Watched(title="rank 1", role="worker", pid=os.getpid())])
    assert [(title, rank.process.title) for title, rank in watch._ranks.items()] == [("rank 1", "rank 1")]
