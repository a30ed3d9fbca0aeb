"""Faster ranks get more: how replicas and samples are split, what is measured for it, and what memory allows."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.cgroup import ControlGroups
from phalanx.cluster.shares import split_rows
from phalanx.comm.batch.replicas import Replicas, assign_replicas
from phalanx.comm.batch.sample_split import START, SampleSplit
from phalanx.comm.waits.waiting import waits
from phalanx.errors import PlanError, StrategyError
from phalanx.launch.job import registry
from phalanx.parallel.balance import headroom, load_balance
from phalanx.parallel.balance.headroom import Headroom, most_sums
from phalanx.parallel.balance.load_balance import LEAST_INTERVAL, MOST_INTERVAL, LoadBalance, ReplicaSplit
from phalanx.parallel.balance.step_clock import MeasuredWork, StepClock
from phalanx.plan.apportion import RankSpeed, apportion, gain, least_step_s, step_s
from phalanx.plan.rules.balance import check_balance
from phalanx.plan.value import AllReduce, Average, Axis, ParamRule, Plan, Step
from phalanx.strategy import DistributedStrategy


def speeds_of(*seconds: float) -> list[RankSpeed]:
    return [RankSpeed(each) for each in seconds]


@pytest.mark.parametrize(
    ("seconds", "count", "sizes"),
    [([1, 1], 4, [2, 2]), ([1, 3], 8, [6, 2]), ([1, 100], 8, [7, 1]), ([2, 1, 1], 5, [1, 2, 2]), ([1, 1], 2, [1, 1])],
)
def test_sizes_follow_speeds(seconds: list[float], count: int, sizes: list[int]) -> None:
    assert apportion(speeds_of(*seconds), count) == sizes


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 5), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(0, 6),
)
def test_no_other_split_is_done_sooner(ranks: list[tuple[float, float, int]], more: int) -> None:
    speeds, count = [RankSpeed(*rank) for rank in ranks], len(ranks) + more
    sizes = apportion(speeds, count)
    fitting = [
        split
        for split in product(range(1, count + 1), repeat=len(speeds))
        if sum(split) == count and all(size <= speed.most for size, speed in zip(split, speeds, strict=True))
    ]
    if not fitting:
        assert sizes is None
        return
    assert sizes is not None
    assert tuple(sizes) in fitting
    assert step_s(speeds, sizes) == pytest.approx(min(step_s(speeds, split) for split in fitting))
    assert least_step_s(speeds, count) <= step_s(speeds, sizes) * (1 + 1e-9)


def test_equal_ranks_get_equally_many() -> None:
    assert apportion(speeds_of(1.0, 1.0, 1.0), 7) == [len(local) for local in assign_replicas(7, 3)]


def test_a_rank_without_memory_gets_no_more() -> None:
    fast = RankSpeed(1.0, most=5)
    assert apportion([fast, RankSpeed(3.0)], 8) == [5, 3]
    assert apportion([fast, RankSpeed(3.0, most=2)], 8) is None


@given(st.integers(0, 300), st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_every_sample_is_read_once_and_every_rank_has_two_where_there_are_enough(rows: int, parts: list[int]) -> None:
    sizes = split_rows(rows, parts)
    assert sum(sizes) == rows
    assert min(sizes) >= min(2, rows // len(parts))


def test_a_change_holds_from_the_first_batch_that_no_rank_has_cut() -> None:
    split = SampleSplit(2)
    assert split.slice_rows(8, 1, (0, 0, 8)) == (4, 4)
    split.change([6, 2], after=(0, 0, 24))
    assert split.slice_rows(8, 1, (0, 0, 24)) == (4, 4)
    assert split.slice_rows(8, 1, (0, 0, 32)) == (6, 2)
    assert split.slice_rows(8, 0, (0, 1, 8)) == (0, 6)
    assert split.slice_rows(8, 0, (0, 0, 16)) == (0, 4), "a batch that is read again is split as before"
    assert split.slice_rows(8, 0, (1, 0, 8)) == (0, 6), "unless the loader was sent back to it"
    assert split.furthest == (1, 0, 8)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def groups_v1(root: Path) -> ControlGroups:
    for kind in ("cpu", "cpuacct", "memory"):
        (root / kind / "pod" / "box").mkdir(parents=True)
    proc = root / "proc"
    write(
        proc,
        cgroup="5:memory:/pod/box\n4:cpuacct:/pod/box\n3:cpu:/pod/box\n0::/\n",
        mountinfo="".join(
            f"3{n} 31 0:3{n} / {root / kind} rw,relatime - cgroup cgroup rw,{kind}\n"
            for n, kind in enumerate(("cpu", "cpuacct", "memory"))
        ),
    )
    return ControlGroups(proc)


def test_limits_of_control_groups_version_1(tmp_path: Path) -> None:
    groups = groups_v1(tmp_path)
    assert groups.cores() is None
    assert groups.memory_left() is None
    write(tmp_path / "cpu" / "pod" / "box", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    write(tmp_path / "cpu" / "pod", cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    assert groups.cores() == 1.5
    write(tmp_path / "cpu" / "pod" / "box", cpu__cfs_quota_us="25000\n")
    assert groups.cores() == 0.25
    write(tmp_path / "cpuacct" / "pod" / "box", cpuacct__usage="2500000000\n")
    assert groups.cpu_seconds() == 2.5
    write(tmp_path / "cpu" / "pod" / "box", cpu__stat="nr_periods 9\nnr_throttled 3\nthrottled_time 0\n")
    write(tmp_path / "cpu" / "pod", cpu__stat="nr_periods 9\nnr_throttled 3\nthrottled_time 2500000000\n")
    assert groups.throttled_seconds() == 2.5  # the group above holds it back
    assert groups.throttled_share() == pytest.approx(1 / 3)
    memory = tmp_path / "memory" / "pod" / "box"
    write(memory, memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="100\n")
    assert groups.memory_left() is None
    write(memory, memory__limit_in_bytes="1000\n", memory__stat="cache 50\ninactive_file 40\n")
    assert groups.memory_left() == 940


def test_limits_of_control_groups_version_2(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write(root, cpu__max="max 100000\n", cpu__stat="usage_usec 1500000\nuser_usec 1\n")
    write(root, memory__max="3000\n", memory__current="1000\n")
    mount = f"41 31 0:38 / {root} rw - cgroup2 cgroup2 rw\n"
    write(tmp_path / "proc", cgroup="0::/not/seen/from/here\n", mountinfo=mount)
    groups = ControlGroups(tmp_path / "proc")
    assert groups.cores() is None
    assert groups.cpu_seconds() == 1.5
    assert groups.memory_left() == 2000
    write(root, cpu__max="50000 100000\n")
    assert groups.cores() == 0.5
    assert groups.throttled_seconds() == 0.0
    write(root, cpu__stat="usage_usec 1500000\nthrottled_usec 750000\n")
    assert groups.throttled_seconds() == 0.75


def test_no_control_groups_are_no_limit(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path)
    assert groups.cores() is groups.memory_left() is None
    assert groups.cpu_seconds() == pytest.approx(time.process_time(), abs=1.0)


class Hands:
    """A clock and control groups that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.cpu, self.limit = 100.0, 0.0, None
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def refresh(self) -> None:
        pass

    def cores(self) -> float | None:
        return self.limit

    def cpu_seconds(self) -> float:
        return self.cpu

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds

    def wait(self, seconds: float) -> None:
        with waits.waiting(), waits.waiting():
            self.now += seconds


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return Hands(monkeypatch)


def clock_of(hands: Any) -> StepClock:
    return StepClock(torch.device("cpu"), hands)


def test_input_passes_and_updates_count_and_waits_and_what_is_between_do_not(hands: Hands) -> None:
    clock = clock_of(hands)
    for _ in range(3):
        clock.begin_batch()
        hands.work(0.5)  # input
        clock.end_input(4)
        hands.work(2.0)
        hands.wait(7.0)
        clock.begin_update()
        hands.work(1.0)
        hands.wait(3.0)
        clock.end_update()
        hands.work(100.0)  # an evaluation, a checkpoint
    assert clock.take() == MeasuredWork(7.5, 3.0, batches=3, rows=12, updates=3)
    assert clock.take() == MeasuredWork()


def test_all_passes_of_a_round_count_and_the_end_of_an_epoch_does_not(hands: Hands) -> None:
    clock = clock_of(hands)
    for _ in range(2):  # two replicas
        clock.begin_batch()
        hands.work(0.5)
        clock.end_input(3)
        hands.work(1.0)
    clock.begin_update()
    clock.end_update()
    clock.begin_batch()
    hands.work(0.25)
    clock.end_input(None)
    hands.work(50.0)
    clock.begin_batch()
    hands.work(0.5)
    clock.end_input(3)
    clock.begin_update()
    clock.end_update()
    assert clock.take() == MeasuredWork(3.5, 0.0, batches=3, rows=9, updates=2)


def test_seconds_are_no_less_than_a_quota_of_cores_takes(hands: Hands) -> None:
    hands.limit = 0.25
    clock = clock_of(hands)
    clock.begin_batch()
    clock.end_input(1)
    hands.work(2.0)  # at full speed: the quota of the period is not used up
    clock.begin_update()
    hands.work(1.0)
    clock.end_update()
    hands.limit = None
    assert clock.take() == MeasuredWork(8.0, 4.0, batches=1, rows=1, updates=1)
    clock.begin_batch()
    clock.end_input(1)
    hands.work(2.0)
    clock.begin_update()
    assert clock.take().batch_s == 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_timed_in_its_stream_without_what_it_waits() -> None:
    clock, cycles = StepClock(torch.device("cuda")), 200_000_000
    clock.begin_batch()
    clock.end_input(2)
    torch.cuda._sleep(cycles)
    with waits.waiting():
        torch.cuda._sleep(3 * cycles)
    clock.begin_update()
    torch.cuda._sleep(cycles // 2)
    clock.end_update()
    measured = clock.take()
    assert measured.batch_s == pytest.approx(2 * measured.update_s, rel=0.1)
    waits.mark, waits.marks = None, []


@pytest.mark.parametrize(("size", "sums"), [(1, 1), (2, 2), (8, 4)])
def test_partial_sums_that_replicas_need_at_once(size: int, sums: int) -> None:
    assert most_sums(size, 8) == sums


def test_memory_says_how_many_replicas_and_samples_a_rank_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, room = [1000.0], [0.0]
    monkeypatch.setattr(Headroom, "_used_bytes", lambda _: taken[0])
    monkeypatch.setattr(Headroom, "free", lambda _: room[0])
    here = Headroom(torch.device("cpu"), 1)
    assert here.most_replicas(4, 8, 100) == max(n for n in range(1, 9) if most_sums(n, 8) <= most_sums(4, 8))
    room[0] = 1000.0
    assert here.most_replicas(4, 8, 100) == 8
    assert here.most_samples(10, 100) >= 100, "nothing was taken yet"
    taken[0] = 2000.0  # 100 bytes a sample
    assert here.most_samples(10, 100) == 10 + 9
    room[0] = -1.0
    assert here.most_samples(10, 100) == 10
    assert here.most_replicas(4, 8, 100) == max(n for n in range(1, 9) if most_sums(n, 8) <= most_sums(4, 8))


def test_ranks_that_share_a_gpu_divide_its_memory_and_those_with_their_own_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [torch.tensor([7]), torch.tensor([7]), torch.tensor([8]), torch.tensor([9])]
    monkeypatch.setattr(headroom, "all_gather", lambda own, **_: torch.cat(others))
    monkeypatch.setattr(headroom.torch, "tensor", lambda values, **_: torch.as_tensor(values))
    role = SimpleNamespace(local_world_size=4)
    for gpu, count in ((7, 2), (8, 1)):
        monkeypatch.setattr(headroom, "_gpu_id", lambda _, gpu=gpu: gpu)
        context: Any = SimpleNamespace(device=torch.device("cuda", 0), role=role)
        assert headroom.count_sharing_ranks(context) == count
    on_host: Any = SimpleNamespace(device=torch.device("cpu"), role=role)
    assert headroom.count_sharing_ranks(on_host) == 4


def test_the_marks_of_a_clock_end_with_it() -> None:
    first = StepClock(torch.device("cuda"))
    second = StepClock(torch.device("cuda"))
    mark = waits.mark
    del first
    assert waits.mark is mark is not None, "another clock measures"
    del second
    assert waits.mark is None


def test_an_address_space_limit_is_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    size = headroom.process_memory().address_space
    monkeypatch.setattr(headroom.resource, "getrlimit", lambda _: (size + (64 << 20), size))
    assert Headroom(torch.device("cpu"), 1).free() < 80 << 20


class Pair:
    """Two ranks of given speeds, whose decisions are this one's."""

    unit = "samples"
    is_fixed = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        self.seconds, self.sizes, self.now = list(seconds), [8, 8], 0.0
        self.changes: list[list[int]] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(load_balance, "all_gather", self.gather)
        batches = SimpleNamespace(clock=None)
        readers = SimpleNamespace(index=0, group=None, count=2)
        role = SimpleNamespace(local_world_size=2)
        context: Any = SimpleNamespace(
            device=torch.device("cpu"), batches=batches, readers=readers, role=role, rank=1, world_size=2
        )
        self.balance = LoadBalance(context, self)

    def gather(self, values: torch.Tensor, **_: object) -> torch.Tensor:
        rows = values.repeat(2, 1)
        for index, (row, seconds) in enumerate(zip(rows, self.seconds, strict=True)):
            row[0], row[1], row[3] = index, seconds, seconds
        return rows

    def unit_s(self, measured: MeasuredWork) -> float:
        return self.seconds[0]

    def most(self, headroom: Headroom, current: int) -> int:
        return 100

    def position(self) -> tuple[int, int, int]:
        return START

    def change(self, sizes: Any, after: Any) -> None:
        self.sizes = list(sizes)
        self.changes.append(self.sizes)

    def train(self, updates: int, update_s: float = 0.1) -> None:
        for _ in range(updates):
            self.balance.begin_update(None)  # type: ignore[arg-type]
            self.now += update_s
            self.balance.updated(None)  # type: ignore[arg-type]


def test_a_split_changes_once_another_would_have_saved_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, 1.0, 1.0)
    pair.train(3 * MOST_INTERVAL, update_s=0.3)
    pair.seconds = [1.0, 2.0]  # 11 + 5 samples save 0.31 of a step
    pair.train(2 * LEAST_INTERVAL - 1, update_s=0.3)
    assert not pair.changes
    pair.train(1, update_s=0.3)
    assert pair.changes == [[11, 5]]
    pair.train(10 * MOST_INTERVAL, update_s=0.3)
    assert len(pair.changes) == 1


def test_a_speed_that_changes_between_two_exchanges_is_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, 1.0, 1.0)
    pair.train(3 * MOST_INTERVAL, update_s=0.3)
    pair.seconds = [1.0, 1.5]  # some updates of this exchange were fast
    pair.train(LEAST_INTERVAL, update_s=0.3)
    pair.seconds = [1.0, 3.0]
    pair.train(10 * MOST_INTERVAL, update_s=0.3)
    assert pair.changes == [[12, 4]]


def test_a_small_gain_takes_twenty_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, 1.0, 1.2)
    assert 0.05 < gain(speeds_of(*pair.seconds), [8, 8], [9, 7]) < 0.0626
    pair.train(MOST_INTERVAL, update_s=0.3)
    pair.train(5, update_s=0.3)
    assert not pair.changes
    pair.train(MOST_INTERVAL, update_s=0.3)
    assert pair.changes == [[9, 7]]


def test_a_slow_moment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, 1.0, 1.0)
    for _ in range(4):
        pair.train(MOST_INTERVAL)
        pair.seconds = [1.0, 9.0]
        pair.train(2)
        pair.seconds = [1.0, 1.0]
    assert not pair.changes


def test_updates_are_compared_as_often_as_each_half_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, 1.0, 3.0)
    pair.train(MOST_INTERVAL + 7, update_s=0.052)  # 8 updates take 0.416 s
    assert not pair.changes
    pair.train(1, update_s=0.052)
    assert pair.changes == [[12, 4]]


def test_a_gain_of_less_than_five_percent_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, 1.0, 1.06)
    assert gain(speeds_of(*pair.seconds), [8, 8], [9, 7]) < 0.05
    pair.train(4 * MOST_INTERVAL)
    assert not pair.changes


def test_short_updates_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, 1.0, 3.0)
    pair.train(8 * MOST_INTERVAL, update_s=0.002)
    assert not pair.changes, "0.16 s are two periods of the scheduler"
    pair.train(40 * MOST_INTERVAL, update_s=0.002)
    assert pair.changes == [[12, 4]]


def test_ps_shows_replicas_or_shares_where_ranks_are_balanced() -> None:
    def process(rank: int, **reported: Any) -> dict[str, Any]:
        silent = dict.fromkeys(registry._REPORTED)
        return {"role": "worker", "rank": rank, "pid": 7, "log": "l", "alive": True, **silent, **reported}

    job: dict[str, Any] = {"job_id": "j", "script": "s", "mode": "m", "pid": 1, "age_s": 1.0}
    plain = registry.render([{**job, "processes": [process(0, step=3)]}])
    assert "share" not in plain
    ranks = [
        process(0, step=3, share=0.75, ms_per_sample=1.25),
        process(1, step=3, share=0.25, replicas=2, ms_per_sample=4.5),
        process(2),
    ]
    _, head, first, second, third = registry.render([{**job, "processes": ranks}]).splitlines()
    assert head.split()[-3:] == ["share", "ms/sample", "log"]
    assert first.split()[-4:] == ["75", "%", "1.25", "l"]
    assert second.split()[-4:] == ["2", "replicas", "4.5", "l"]
    assert third.split()[-3:] == ["-", "-", "l"]


def test_a_move_that_waits_for_the_end_of_an_epoch_is_not_decided_again() -> None:
    replicas = Replicas((range(4), range(4, 8)), 0)
    context: Any = SimpleNamespace(batches=SimpleNamespace(is_reading_ahead=False))
    split = ReplicaSplit(context, replicas)
    replicas.pin()
    split.change([6, 2], START)
    assert (split.sizes, split.is_fixed) == ([4, 4], True)
    replicas.unpin()
    assert (split.sizes, split.is_fixed) == ([6, 2], False)
    assert replicas.assignment == (range(6), range(6, 8))


def plan_of(*axes: Axis, update: Any = None, **step: Any) -> Plan:
    return Plan(
        mesh=axes or (Axis(name="data", size=2),),
        params=(ParamRule(match="*", update=update or AllReduce()),),
        step=Step(batch_axes=("data",), **step),
    )


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (plan_of(balance="replicas"), "none were asked for"),
        (plan_of(balance="samples", replicas=4), "4 logical replicas"),
        (plan_of(Axis(name="data", size=2), Axis(name="model", size=2), balance="samples"), "'model'"),
        (plan_of(balance="samples", update=AllReduce(reduce="sum")), "sum"),
        (plan_of(balance="samples", update=Average(every=2)), "average"),
    ],
)
def test_what_cannot_be_balanced_is_refused(plan: Plan, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        check_balance(plan)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ({"shares": (1, 1)}, "step.balance"),
        ({"shares": (1, 1, 1), "balance": "samples"}, "3 entries, and 2 ranks"),
        ({"shares": (1, 1), "balance": "replicas", "replicas": 4}, "2 replicas, and step.replicas is 4"),
    ],
)
def test_shares_that_are_not_of_the_ranks_are_refused(step: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        plan_of(**step)


def test_a_split_begins_with_the_shares_of_a_plan() -> None:
    assert SampleSplit(2, (12, 4)).slice_rows(8, 1, (0, 0, 8)) == (6, 2)
    assert assign_replicas(8, 2, (6, 2)) == (range(6), range(6, 8))


def test_plans_that_said_only_whether_replicas_move_are_read() -> None:
    assert Step.model_validate({"balance": True, "replicas": 4}).balance == "replicas"
    assert Step.model_validate({"balance": False}).balance is None


def test_the_earlier_word_says_the_word_of_now() -> None:
    with pytest.raises(StrategyError, match='balance = "replicas"'):
        DistributedStrategy(balance_replicas=True)  # type: ignore[call-arg]
