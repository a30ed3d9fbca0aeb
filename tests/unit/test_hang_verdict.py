"""From what ranks do to who is waited for: pure parts of the hang report."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.cli.why_command import find_job, settled
from phalanx.launch.hang.locations import Location, location_of, location_of_frames
from phalanx.launch.hang.observe import Observation
from phalanx.launch.hang.stacks import Frame, Stacks, ThreadStack, parse_dump
from phalanx.launch.hang.verdict import judge
from phalanx.launch.job import registry
from phalanx.launch.rank.activity import Activity, Call
from phalanx.ps.stores import fan_out
from phalanx.ps.wire import channel, message
from phalanx.ps.wire.client import connection, dial, link, server_connections

NOW = 1000.0
TORCH = "/env/lib/python3.11/site-packages/torch"


def frame(file: str, line: int, function: str) -> Frame:
    return Frame(file=file, line=line, function=function)


ALL_REDUCE = location_of_frames(
    [
        frame(f"{TORCH}/distributed/distributed_c10d.py", 3245, "all_reduce"),
        frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
        frame("train.py", 92, "<module>"),
    ]
)
ASLEEP = location_of_frames([frame("train.py", 81, "load"), frame("train.py", 90, "<module>")])


def call(number: int, **more: Any) -> Call:
    values = {"verb": "all_reduce", "number": number, "group": "0", "members": (0, 1, 2), "since": NOW - 14.0}
    return Call(**{**values, "detail": "float32[8]", **more})


def rank(number: int, location: Location, made: int, calls: tuple[Call, ...] = (), **more: Any) -> Observation:
    activity = Activity(looked_at=NOW, begun={"0": made, "1": made}, calls=calls)
    values = {"title": f"rank {number}", "role": "worker", "pid": 100 + number, "at": NOW, "activity": activity}
    return Observation(**{**values, "location": location, **more})


def waiting(number: int, made: int = 7, **more: Any) -> Observation:
    return rank(number, ALL_REDUCE, made, (call(made),), **more)


def test_the_rank_that_made_fewer_calls_is_named_with_its_line_and_what_the_others_wait_in() -> None:
    verdict = judge([waiting(0), waiting(1), rank(2, ASLEEP, made=6)])
    assert verdict is not None
    assert verdict.lines[0] == (
        "rank 2 is at train.py:81 in load; ranks 0, 1 wait for 14 s in all_reduce 7 (float32[8]) called at train.py:92"
    )
    assert (verdict.cause, verdict.culprits, verdict.works, verdict.is_certain) == ("rank", ("rank 2",), False, False)


def test_a_rank_that_computes_is_named_and_said_to_work() -> None:
    verdict = judge([waiting(0), waiting(1), rank(2, ASLEEP, made=6, cpu=0.97)])
    assert verdict is not None
    assert verdict.works
    assert any("97%" in line for line in verdict.lines)


def test_a_rank_whose_processes_compute_works_and_one_whose_compiler_does_compiles() -> None:
    idle = judge([waiting(0), waiting(1), rank(2, ASLEEP, made=6)])
    busy = judge([waiting(0), waiting(1), rank(2, ASLEEP, made=6, work="is computing")])
    compiler = Location(kind="compile")
    compiling = judge([waiting(0), waiting(1), rank(2, compiler, made=6, work="is computing")])
    assert idle is not None
    assert busy is not None
    assert compiling is not None
    assert (idle.works, busy.works, compiling.works, compiling.is_compiling) == (False, True, True, True)
    assert any("a process that it started, is at work" in line for line in busy.lines)


def test_a_stopped_rank_is_certain_wherever_its_stack_is() -> None:
    verdict = judge([waiting(0), rank(1, ALL_REDUCE, made=7, calls=(call(7),), is_stopped=True), waiting(2)])
    assert verdict is not None
    assert (verdict.culprits, verdict.is_certain) == (("rank 1",), True)


def test_a_rank_that_has_ended_is_named_with_how() -> None:
    verdict = judge([waiting(0), waiting(1), rank(2, Location(kind="unknown"), 7, ended="ended with exit code 0")])
    assert verdict is not None
    assert verdict.lines[0].startswith("rank 2 ended with exit code 0; ranks 0, 1 wait")


def test_different_calls_of_one_number_contradict_each_other() -> None:
    other = call(7, verb="broadcast")
    verdict = judge([waiting(0), rank(1, ALL_REDUCE, 7, (other,))])
    assert verdict is not None
    assert verdict.cause == "mismatch"
    assert "call 7 of the default group: rank 0 in all_reduce 7" in verdict.lines[0]
    assert "rank 1 in broadcast 7" in verdict.lines[0]


@pytest.mark.parametrize(("detail", "cause"), [("float32[9]", "mismatch"), ("float64[8]", "mismatch"), ("", "network")])
def test_shape_and_dtype_are_part_of_a_call_that_is_the_same_on_all_ranks(detail: str, cause: str) -> None:
    verdict = judge([waiting(0), rank(1, ALL_REDUCE, 7, (call(7, detail=detail or "float32[2, 4]"),)), waiting(2)])
    assert verdict is not None
    assert verdict.cause == cause


def test_groups_in_another_order_wait_for_each_other() -> None:
    first = rank(
        0, ALL_REDUCE, 0, (call(5, group="0"),), activity=_made({"0": 5, "1": 4}, call(5, group="0", members=(0, 1)))
    )
    second = rank(1, ALL_REDUCE, 0, (), activity=_made({"0": 4, "1": 5}, call(5, group="1", members=(0, 1))))
    verdict = judge([first, second])
    assert verdict is not None
    assert (verdict.cause, verdict.culprits, verdict.is_certain) == ("order", ("rank 0", "rank 1"), True)
    assert "ranks wait for each other" in verdict.lines[0]
    assert "of group 1 (ranks 0, 1)" in verdict.lines[0]


def _made(made: dict[str, int], waits_in: Call) -> Activity:
    return Activity(looked_at=NOW, begun=made, calls=(waits_in,))


def test_a_chain_of_waits_ends_at_the_rank_that_waits_for_nobody() -> None:
    # Rank 0 waits for rank 1 in one group, which waits for rank 2 in another.
    first = rank(0, ALL_REDUCE, 0, activity=_made({"a": 5}, call(5, group="a", members=(0, 1))))
    second = rank(1, ALL_REDUCE, 0, activity=_made({"a": 4, "b": 3}, call(3, group="b", members=(1, 2))))
    third = rank(2, ASLEEP, 0, activity=Activity(looked_at=NOW, begun={"b": 2}))
    verdict = judge([first, second, third])
    assert verdict is not None
    assert verdict.culprits == ("rank 2",)


@pytest.mark.parametrize("module", [connection, dial, link, server_connections, channel, message, fan_out])
def test_a_worker_inside_its_connection_to_a_server_waits_for_a_server(module: ModuleType) -> None:
    frames = [Frame(file=str(module.__file__), line=1, function="read"), Frame(file="train.py", line=2, function="f")]
    assert location_of_frames(frames).kind == "server"


def test_a_worker_that_waits_for_its_server_names_the_server() -> None:
    pull = Call(
        verb="pull",
        number=3,
        backend="wire",
        group="server 0",
        since=NOW - 9.0,
        missing=("server 0",),
        is_collective=False,
    )
    location = Location(
        kind="server", source="train.py:12", function="SparseEmbedding.forward", verb="SparseEmbedding.forward"
    )
    server = rank(
        0, Location(kind="code"), 0, title="server 0", role="server", is_stopped=True, troubles=("it is stopped",)
    )
    verdict = judge([rank(0, location, 0, (pull,)), server])
    assert verdict is not None
    assert (
        verdict.lines[0] == "server 0 does not answer; rank 0 waits for 9 s in pull from server 0 called at train.py:12"
    )
    assert "server 0: it is stopped" in verdict.lines


def test_ranks_of_other_hosts_are_not_taken_for_a_broken_network() -> None:
    verdict = judge([waiting(0), waiting(1)])
    assert verdict is not None
    assert verdict.culprits == ()
    assert verdict.lines[0].endswith("; not seen: rank 2, on another host. Ask there")


def test_ranks_that_all_compute_are_no_hang() -> None:
    assert judge([rank(0, ASLEEP, 5, cpu=1.0), rank(1, ASLEEP, 5)]) is None


def test_a_bucket_that_is_reduced_while_the_script_computes_is_no_wait() -> None:
    assert judge([rank(0, ASLEEP, 7, (call(7),), cpu=0.9), rank(1, ASLEEP, 7, (call(7),), cpu=0.9)]) is None


def test_a_place_is_the_users_innermost_line_and_what_it_calls() -> None:
    loader = f"{TORCH}/utils/data/dataloader.py"
    location = location_of_frames(
        [
            frame("/usr/lib/python3.11/multiprocessing/queues.py", 113, "Queue.get"),
            frame(loader, 1278, "_MultiProcessingDataLoaderIter._try_get_data"),
            frame(loader, 720, "_BaseDataLoaderIter.__next__"),
            frame("/home/me/train.py", 81, "main"),
            frame("/home/me/train.py", 99, "<module>"),
        ]
    )
    # The queue says less than the loader that reads it.
    assert (location.kind, location.function) == ("data", "DataLoader.__next__")
    assert location.source.endswith("train.py:81")


def test_a_hook_on_a_thread_of_autograd_is_where_a_backward_pass_is() -> None:
    main = (frame(f"{TORCH}/autograd/graph.py", 800, "_engine_run_backward"), frame("train.py", 50, "<module>"))
    hook = (frame("train.py", 12, "slow"),)
    threads = (ThreadStack(name="", frames=hook, is_main=False), ThreadStack(name="", frames=main, is_main=True))
    assert str(location_of(Stacks(threads=threads))) == "train.py:12 in slow"
    assert location_of(Stacks(threads=threads[1:])).kind == "backward"


DUMP = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f2 (most recent call first):
  File "train.py", line 3 in load
  File "train.py", line 9 in <module>
"""


def test_a_dump_of_faulthandler_gives_the_stacks_too() -> None:
    threads = parse_dump(DUMP)
    assert [thread.is_main for thread in threads] == [False, True]
    assert threads[1].frames == (frame("train.py", 3, "load"), frame("train.py", 9, "<module>"))


JOBS = [
    {"job_id": "ab12", "script": "a.py", "pid": 7, "processes": [{"role": "worker", "rank": 1, "pid": 70}]},
    {"job_id": "cd34", "script": "b.py", "pid": 8, "processes": []},
    {"job_id": "ab99", "script": "c.py", "pid": 9, "processes": [{"role": "heter_worker", "rank": 0, "pid": 90}]},
]


@pytest.mark.parametrize(
    ("job", "pid", "title"), [("ab1", None, "rank 1"), (None, 7, "rank 1"), (None, 90, "heter worker 0")]
)
def test_a_job_is_named_by_its_id_or_any_of_its_processes(
    monkeypatch: pytest.MonkeyPatch, job: str | None, pid: int | None, title: str
) -> None:
    monkeypatch.setattr(registry, "jobs", lambda: JOBS)
    assert [process.title for process in find_job(job, pid)] == [title]


@pytest.mark.parametrize(
    ("job", "pid", "problem"),
    [
        (None, None, r"3 jobs match; running jobs: ab12 \(a.py\), cd34 \(b.py\), ab99"),
        ("ab", None, "2 jobs match"),
        ("x", None, "0 jobs match"),
        ("cd34", None, "Job cd34 has not started"),
        ("ab1", 7, "two ways to name a job"),
        (None, 1 << 22, "There is no process 4194304"),
    ],
)
def test_what_is_asked_of_no_job_or_of_several_is_refused(
    monkeypatch: pytest.MonkeyPatch, job: str | None, pid: int | None, problem: str
) -> None:
    monkeypatch.setattr(registry, "jobs", lambda: JOBS)
    with pytest.raises(LaunchError, match=problem):
        find_job(job, pid)


def test_what_changes_between_two_looks_is_work() -> None:
    before, now = waiting(0), rank(0, ALL_REDUCE, 8, (call(8),))
    assert settled(before, before) == before
    assert settled(before, now).calls == ()
    assert settled(before, rank(0, ALL_REDUCE, 8, (call(7),))).calls == ()
    assert judge([settled(before, now), settled(waiting(1), rank(1, ALL_REDUCE, 8, (call(8),)))]) is None
