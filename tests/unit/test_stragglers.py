"""From what ranks spent their time on to who is slow, why, and what it costs: pure parts of the slow report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.launch.rank.activity import Activity
from phalanx.launch.slow.counters import Reading
from phalanx.launch.slow.goodput import Goodput
from phalanx.launch.slow.stragglers import find_losses
from phalanx.launch.slow.time_spent import RankName, TimeSpent, named_waits, rename_ranks, spent_between, sum_of
from phalanx.launch.slow.words import lines_of

RUN_S = 360.0


def spent(**more: Any) -> TimeSpent:
    """Of a rank that computes half of the time, and has nothing to wait for but the bytes."""
    return TimeSpent(**{"total_s": RUN_S, "cpu_s": 180.0, "in_calls_s": 10.0, **more})


def waiting(rank: RankName, seconds: float, **more: Any) -> TimeSpent:
    return spent(waits_s={rank: seconds}, in_calls_s=seconds + 10.0, **more)


def job(straggler: TimeSpent) -> dict[RankName, TimeSpent]:
    """Four ranks of which three wait for rank 2 for 11 % of the time."""
    return {0: waiting(2, 39.6), 1: waiting(2, 41.0), 2: straggler, 3: waiting(2, 38.2)}


CASES = {
    "throttled": (
        {"throttled_s": 36.0, "queued_s": 38.0, "cores": 0.5},
        "its cgroup was throttled 10% of the time (cpu.max: 0.5 cores)",
    ),
    "contention": ({"queued_s": 36.0}, "other processes had its core 10% of the time"),
    "swap": (
        {"uninterruptible_s": 36.0, "faults": 40_000, "swapped_bytes": 3 << 30},
        "it waited 10% of the time for its memory, 3 GiB of it swapped out",
    ),
    "disk": (
        {"uninterruptible_s": 36.0, "faults": 12},
        "it waited 10% of the time for a disk or a network file system",
    ),
    "collector": (
        {"cpu_s": 216.0, "collector_s": 36.0},
        "Python's garbage collector ran 10% of the time (gc.freeze() after the start helps)",
    ),
    "input": ({"input_s": 54.0, "input_cpu_s": 10.0}, "its input took 15% of the time"),
    "computation": ({"cpu_s": 216.0}, "it computed for longer: 60% of the time"),
}


@pytest.mark.parametrize(("more", "words"), CASES.values(), ids=CASES)
def test_the_rank_that_others_wait_for_is_named_with_its_cause(more: dict[str, Any], words: str) -> None:
    ours = {"cpu_s": 180.0, "in_calls_s": 140.0, **more}
    (line,) = lines_of(find_losses(job(spent(**ours)), 0.05))
    assert line == f"ranks 0, 1, 3 waited 396 s an hour for rank 2 (11% of the time): {words}"


def test_a_rank_that_sleeps_outside_of_its_calls_is_told_from_one_that_computes() -> None:
    # The others are in collectives whenever they do not compute; this one is elsewhere.
    ranks: dict[RankName, TimeSpent] = {r: waiting(1, 100.0, cpu_s=200.0, queued_s=50.0) for r in (0, 2)}
    ranks[1] = spent(cpu_s=200.0, queued_s=50.0, in_calls_s=5.0)
    (straggler,) = find_losses(ranks, 0.05).stragglers
    assert [each.cause for each in straggler.causes] == ["asleep"]


def test_two_causes_are_named_the_larger_first() -> None:
    own = spent(in_calls_s=140.0, queued_s=24.0, collector_s=14.0, cpu_s=194.0)
    (straggler,) = find_losses(job(own), 0.05).stragglers
    assert [each.cause for each in straggler.causes] == ["contention", "collector"]


def test_what_all_ranks_have_alike_is_no_cause_of_one_of_them() -> None:
    ranks = {r: replace(each, queued_s=60.0) for r, each in job(spent(cpu_s=215.0, in_calls_s=80.0)).items()}
    (straggler,) = find_losses(ranks, 0.05).stragglers
    assert [each.cause for each in straggler.causes] == ["computation"]


@pytest.mark.parametrize("share", [0.05, 0.0])
def test_little_is_not_worth_a_word(share: float) -> None:
    assert find_losses({0: waiting(1, 2.9), 1: waiting(0, 2.9)}, share).is_empty
    assert find_losses({}, share).is_empty


def test_a_share_below_the_users_is_not_said() -> None:
    assert not find_losses(job(spent(queued_s=36.0)), 0.10).is_empty
    assert find_losses(job(spent(queued_s=36.0)), 0.12).is_empty


def test_input_that_keeps_every_rank_is_said_once() -> None:
    ranks: dict[RankName, TimeSpent] = {r: spent(input_s=100.0 + r, in_calls_s=20.0) for r in range(2)}
    assert lines_of(find_losses(ranks, 0.05)) == ("of every rank: its input took 28% of the time",)


def test_waits_that_nobody_on_this_host_causes_are_for_others_or_the_network() -> None:
    ranks = named_waits({0: spent(unnamed_wait_s=90.0), 1: spent(unnamed_wait_s=91.0)})
    assert find_losses(ranks, 0.05).is_empty
    (line,) = lines_of(find_losses(ranks, 0.05, has_other_hosts=True))
    assert line.startswith("the ranks of this host waited 25% of the time for those of other hosts")


def test_in_calls_that_name_nobody_the_rank_that_waits_least_is_waited_for() -> None:
    ranks = named_waits({0: spent(unnamed_wait_s=50.0), 1: spent(unnamed_wait_s=8.0), 2: spent(unnamed_wait_s=52.0)})
    assert {r: dict(each.waits_s) for r, each in ranks.items()} == {0: {1: 42.0}, 1: {}, 2: {1: 44.0}}


def test_stretches_with_different_stragglers_add_up() -> None:
    stretches: list[dict[RankName, TimeSpent]] = [{0: waiting(1, 50.0), 1: spent()}, {0: spent(), 1: waiting(0, 30.0)}]
    losses = find_losses(sum_of(stretches), 0.0)
    assert [(s.rank, s.waiters, s.lost_s) for s in losses.stragglers] == [(1, (0,), 50.0), (0, (1,), 30.0)]
    assert losses.total_s == 2 * RUN_S


def test_the_goodput_says_what_was_lost_to_whom() -> None:
    losses = find_losses(job(spent(queued_s=36.0, in_calls_s=140.0)), 0.05)
    assert Goodput(total_s=400.0, start_s=40.0, losses=losses).describe() == (
        "goodput 80.1 %: 5:20 of steps in 6:40; lost: 40.0 s start, 39.6 s waits for rank 2"
    )


def test_a_rank_is_called_by_its_member_id_where_numbers_change_hands() -> None:
    views = [["n0.0", "n0.1", "n0.2"], ["n0.1", "n0.2", "n0.10"]]  # rank 0 is lost, and another rank joins
    stretches = []
    for ids, late in zip(views, (1, 0), strict=True):
        names = dict(enumerate(ids))
        ranks = {rank: spent(in_calls_s=140.0) if rank == late else waiting(late, 40.0) for rank in names}
        stretches.append({names[rank]: rename_ranks(each, names) for rank, each in ranks.items()})
    (line,) = lines_of(find_losses(sum_of(stretches), 0.05))
    assert line.startswith("n0.0, n0.2, n0.10 waited 267 s an hour for n0.1 (7% of the time)")


def test_a_rank_that_came_late_is_compared_with_as_much_of_the_time_of_the_others() -> None:
    late = {"total_s": 36.0, "cpu_s": 18.0, "in_calls_s": 0.0, "collector_s": 9.0}
    others = {name: waiting("n0.2", 9.0, collector_s=10.0) for name in ("n0.0", "n0.1")}
    (straggler,) = find_losses({**others, "n0.2": spent(**late)}, 0.02).stragglers
    assert "collector" in [each.cause for each in straggler.causes]


def test_what_a_rank_lost_that_left_soon_does_not_hide_what_the_others_lost_alike() -> None:
    stayed: dict[RankName, TimeSpent] = {f"n0.{n}": spent(input_s=100.0, in_calls_s=20.0) for n in range(2)}
    left = spent(total_s=20.0, cpu_s=20.0, in_calls_s=0.0)
    assert lines_of(find_losses({**stayed, "n0.2": left}, 0.05)) == ("of every rank: its input took 28% of the time",)


def test_waits_for_ranks_that_others_watch_are_for_other_hosts() -> None:
    ranks: dict[RankName, TimeSpent] = {"n0.0": waiting(2, 90.0), "n0.1": waiting(2, 90.0)}
    (line,) = lines_of(find_losses(ranks, 0.05, has_other_hosts=True))
    assert line.startswith("the ranks of this host waited 25% of the time for those of other hosts")


def reading(at: float, cpu_s: float, **said: Any) -> Reading:
    return Reading(
        at=at, cpu_s=cpu_s, queued_s=0.0, throttled_s=0.0, uninterruptible_s=0.0, faults=0, swapped_bytes=0,
        cores=None, activity=Activity(looked_at=at, **said),
    )  # fmt: skip


def test_waits_of_the_main_thread_count_as_they_are() -> None:
    after = reading(10.0, 9.5, in_calls_s=4.5, main_waits_s={"1": 4.0}, entered_waits_s={"1": 4.0})
    assert spent_between(reading(0.0, 0.0), after).waits_s == {1: 4.0}  # it spins a little while it waits


def test_waits_in_the_background_count_as_far_as_the_main_thread_did_not_run() -> None:
    """As of DistributedDataParallel: buckets wait for the other rank while the backward pass continues."""
    after = reading(10.0, 7.0, entered_waits_s={"1": 4.0, "2": 2.0})
    assert spent_between(reading(0.0, 0.0), after).waits_s == pytest.approx({1: 2.0, 2: 1.0})


def test_waits_for_input_are_not_waits_for_ranks() -> None:
    after = reading(10.0, 2.0, input_s=6.0, begun_calls_s=5.0)
    assert spent_between(reading(0.0, 0.0), after).unnamed_wait_s == pytest.approx(2.0)
