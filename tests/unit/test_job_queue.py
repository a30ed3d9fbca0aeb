"""Who starts next on one machine."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.jobs.scheduling.queue import AGEING_S, Amount, RunningJob, WaitingJob, choose, needed_amount, sort_queue
from phalanx.jobs.scheduling.quotas import Quota
from phalanx.jobs.spec.training_job import TrainingJob

MACHINE = Amount(cpu=4000, memory=4096, gpu=2)


def waiting(id: str, cpu: float = 1, owner: str = "ann", **more: object) -> WaitingJob:
    gpu, memory = more.pop("gpu", 0), more.pop("memory", 0)
    need = Amount(int(cpu * 1000), memory, gpu)  # type: ignore[arg-type]
    return WaitingJob(id, owner, more.pop("priority", 5), more.pop("waited_s", 0.0), need, **more)  # type: ignore[arg-type]


def running(id: str, cpu: float = 1, owner: str = "ann", gpu: int = 0, queue: str = "default") -> RunningJob:
    return RunningJob(id, owner, Amount(int(cpu * 1000), 0, gpu), queue)


def test_priority_comes_before_the_order_of_submission() -> None:
    chosen = choose([waiting("old", 4, waited_s=60), waiting("urgent", 4, priority=9)], [], MACHINE, {})
    assert chosen.start == ["urgent"]
    assert chosen.reasons == {"old": "needs 4 cpu, none is free; next in line"}


def test_equal_jobs_start_in_the_order_of_submission() -> None:
    chosen = choose([waiting("b", 2, waited_s=1), waiting("a", 2, waited_s=2)], [], MACHINE, {})
    assert chosen.start == ["a", "b"]


def test_waiting_makes_up_for_priority() -> None:
    chosen = choose(
        [waiting("old", 4, priority=1, waited_s=8.5 * AGEING_S), waiting("new", 4, priority=8)], [], MACHINE, {}
    )
    assert chosen.start == ["old"]


def test_owners_of_one_level_take_turns() -> None:
    many = [waiting(f"ann-{i}", waited_s=100 - i) for i in range(4)] + [
        waiting(f"bob-{i}", owner="bob") for i in range(2)
    ]
    assert choose(many, [], MACHINE, {}).start == ["ann-0", "bob-0", "ann-1", "bob-1"]


def test_who_used_less_lately_comes_first() -> None:
    chosen = choose([waiting("a", 4, waited_s=9), waiting("b", 4, owner="bob")], [], MACHINE, {"ann": 3600, "bob": 60})
    assert chosen.start == ["b"]


def test_a_small_job_fills_what_the_first_in_line_will_not_need() -> None:
    jobs = [waiting("cards", 1, gpu=2, waited_s=9), waiting("small", 1)]
    assert choose(jobs, [running("r", 2, gpu=1)], MACHINE, {}).start == ["small"]


def test_a_job_that_would_hold_up_the_first_in_line_waits_and_says_so() -> None:
    chosen = choose([waiting("big", 4, waited_s=9), waiting("small", 1)], [running("r", 2)], MACHINE, {})
    assert chosen.start == []
    assert chosen.reasons == {
        "big": "needs 4 cpu, 2 cpu are free; next in line",
        "small": "fits now, but big, which is first in line, would start later; 2nd in line",
    }


def test_a_quota_holds_back_its_queue_and_nobody_else() -> None:
    jobs = [waiting("a", queue="team", waited_s=9), waiting("b")]
    chosen = choose(jobs, [running("r", queue="team")], MACHINE, {}, {"team": Quota(jobs=1, cpu=3)})
    assert (chosen.start, chosen.reasons) == (["b"], {"a": "the quota of queue team is used up"})
    assert choose(jobs, [running("r", 2.5, queue="team")], MACHINE, {}, {"team": Quota(cpu=3)}).start == ["b"]


def test_a_job_larger_than_the_machine_holds_up_nobody() -> None:
    chosen = choose([waiting("huge", 9, waited_s=9), waiting("small")], [], MACHINE, {})
    assert chosen.start == ["small"]
    assert chosen.reasons["huge"] == ("needs more than this machine has (9 cpu, it has 4 cpu, 4 GiB of memory, 2 gpu)")


def test_far_back_in_line_the_reason_does_not_change_with_the_place() -> None:
    chosen = choose([waiting(f"j{i:02}", 4, waited_s=-i) for i in range(30)], [], MACHINE, {})
    assert chosen.reasons["j20"].endswith("20th in line")
    assert {chosen.reasons[f"j{i}"] for i in range(21, 30)} == {"more than 20 jobs are before it in line"}


def test_who_does_not_say_gets_one_core_a_process_and_at_most_the_machine() -> None:
    def spec(**more: object) -> TrainingJob:
        return TrainingJob.model_validate({"name": "n", "command": "python t.py", **more})

    assert needed_amount(spec(resources={"procs_per_node": 2}), MACHINE) == Amount(2000)
    assert needed_amount(spec(resources={"nodes": 2, "procs_per_node": 8}), MACHINE) == Amount(4000)
    assert needed_amount(spec(resources={"nodes": 2, "procs_per_node": 8}, launch="env"), MACHINE) == Amount(2000)
    stated = {"nodes": 2, "cpu": 3, "memory": "1Gi", "gpu": 1}
    servers = {"count": 2, "cpu": 0.5, "memory": "512Mi"}
    assert needed_amount(spec(resources=stated, servers=servers), MACHINE) == Amount(7000, 3072, 2)


amounts = st.builds(
    Amount, st.integers(1, 8).map(lambda n: n * 500), st.integers(0, 4).map(lambda n: n * 1024), st.integers(0, 2)
)
lines = st.lists(
    st.tuples(amounts, st.sampled_from("abc"), st.integers(1, 9), st.integers(0, 20_000)), min_size=1, max_size=8
).map(lambda rows: [WaitingJob(f"w{i}", o, p, float(s), n) for i, (n, o, p, s) in enumerate(rows)])


@st.composite
def holders(draw: st.DrawFn) -> list[RunningJob]:
    """Draw running jobs that fit the machine."""
    held: list[RunningJob] = []
    for i, need in enumerate(draw(st.lists(amounts, max_size=5))):
        if all(sum(one.need[r] for one in held) + need[r] <= MACHINE[r] for r in range(3)):
            held.append(RunningJob(f"r{i}", "abc"[i % 3], need))
    return held


def total(needs: list[Amount]) -> Amount:
    return Amount(*(sum(need[r] for need in needs) for r in range(3)))


@given(lines, holders())
@settings(max_examples=200)
def test_the_machine_is_never_overfilled_and_every_job_is_answered(
    jobs: list[WaitingJob], held: list[RunningJob]
) -> None:
    chosen = choose(jobs, held, MACHINE, {})
    started = [one for one in jobs if one.id in chosen.start]
    assert total([one.need for one in started] + [one.need for one in held]).within(MACHINE)
    assert set(chosen.start) | set(chosen.reasons) == {one.id for one in jobs}
    assert not set(chosen.start) & set(chosen.reasons)


@given(lines, holders())
@settings(max_examples=200)
def test_no_backfill_ever_delays_the_first_in_line(jobs: list[WaitingJob], held: list[RunningJob]) -> None:
    chosen = choose(jobs, held, MACHINE, {})
    first = next((one for one in jobs if chosen.reasons.get(one.id, "").endswith("next in line")), None)
    if first is None:
        return
    # What started before its turn came is in its way by right; what started after it is not.
    by_right: list[RunningJob] = []
    for id in chosen.start:
        one = next(job for job in jobs if job.id == id)
        if sort_queue([one, first], held + by_right, {})[0] is first:
            break
        by_right.append(RunningJob(one.id, one.owner, one.need))
    before = [one.need for one in held + by_right]
    extra = [one.need for one in jobs if one.id in chosen.start[len(by_right) :]]
    for count in range(len(before) + 1):
        for left in combinations(before, count):
            if total([*left, first.need]).within(MACHINE):
                assert total([*left, first.need, *extra]).within(MACHINE)


@given(lines, st.integers(0, 7))
@settings(max_examples=50)
def test_nobody_starves_whatever_keeps_arriving(jobs: list[WaitingJob], at: int) -> None:
    """Every round the oldest running job ends and a newcomer of the highest priority arrives."""
    watched = jobs[at % len(jobs)].id
    waits, held, started = list(jobs), [RunningJob("r", "z", MACHINE)], False
    for round in range(80):
        if held:
            held.pop(0)
        waits = [WaitingJob(w.id, w.owner, w.priority, w.waited_s + AGEING_S, w.need) for w in waits]
        waits.append(WaitingJob(f"new-{round}", "z", 9, 0.0, Amount(500)))
        chosen = choose(waits, held, MACHINE, {})
        held += [RunningJob(w.id, w.owner, w.need) for w in waits if w.id in chosen.start]
        started = started or watched in chosen.start
        waits = [w for w in waits if w.id not in chosen.start]
    assert started
