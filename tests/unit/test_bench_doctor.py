"""The rules by which `bench_doctor` calls what is said of a fault right."""

from __future__ import annotations

import pytest

from benchmarks.doctor_faults import FAULTS, Fault
from benchmarks.doctor_limits import LIMITS
from benchmarks.doctor_outcome import find_in_report, find_in_tracebacks
from benchmarks.doctor_tools import (
    _SPY_FRAME,
    _find_in_record,
    _find_in_stacks,
    _frames,
    _recorded,
    _script_of_torch,
    _stacks_of_page,
    _without_server,
)
from benchmarks.doctor_waits import WAITS

EVERY = (*FAULTS, *WAITS, *LIMITS)
SLEEP = Fault(name="sleep", script="import time\n\ntime.sleep(1)  # FAULT\n")
BOTH = Fault(name="both", script="call()  # FAULT\nother()  # FAULT\n", culprits=(0, 1))

SPIED = """Process 7: python train.py
Python v3.11.7

Thread 7 (idle): "MainThread"
    sleep (train.py:3)
    <module> (train.py:9)
Thread 8 (idle): "Thread-1"
    wait (threading.py:331)
"""
DUMPED = """
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Thread 0x00007e (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 2999 in all_reduce
  File "/tmp/job/train.py", line 5 in <module>
"""
PAGE = f"""<h1>Stacks</h1>
<h2>Rank 0: http://a:1</h2>
<pre>{DUMPED.replace("<", "&lt;")}</pre>
<h2>Rank 1: http://b:2</h2>
<p>Failed to fetch: status=408</p>"""


def test_faults_have_names_of_their_own_and_say_what_must_be_named() -> None:
    assert len({fault.name for fault in EVERY}) == len(EVERY) >= 45
    assert all(fault.lines or fault.words for fault in EVERY)


def test_main_threads_are_found_in_the_output_of_both_tools() -> None:
    assert _frames(SPIED, _SPY_FRAME) == [("train.py", 3), ("train.py", 9)]
    stacks = _stacks_of_page(PAGE)
    assert [line for _, line in stacks[0]] == [2999, 5]
    assert stacks[1] == []


WAITS_AT_5 = [("torch/distributed/distributed_c10d.py", 1), ("train.py", 5)]


@pytest.mark.parametrize(
    ("stacks", "found"),
    [
        ({0: WAITS_AT_5, 1: [("train.py", 3)]}, "line"),
        ({0: WAITS_AT_5, 1: [("threading.py", 8), ("train.py", 3)]}, "line"),
        ({0: WAITS_AT_5, 1: [("train.py", 2)]}, "rank"),
        ({0: WAITS_AT_5}, "rank"),
        ({0: WAITS_AT_5, 1: WAITS_AT_5}, "nothing"),
        ({0: [("train.py", 3)], 1: WAITS_AT_5}, "nothing"),
        ({}, "nothing"),
    ],
)
def test_who_reads_stacks_blames_the_rank_that_does_not_wait(
    stacks: dict[int, list[tuple[str, int]]], found: str
) -> None:
    assert _find_in_stacks(SLEEP, stacks) == found


def test_ranks_that_contradict_each_other_must_be_seen_at_both_lines() -> None:
    def waits_at(line: int) -> list[tuple[str, int]]:
        return [("torch/distributed/distributed_c10d.py", 1), ("train.py", line)]

    assert _find_in_stacks(BOTH, {0: waits_at(1), 1: waits_at(2)}) == "line"
    assert _find_in_stacks(BOTH, {0: waits_at(1), 1: waits_at(1)}) == "nothing"


def test_a_flight_recorder_names_the_rank_that_is_missing() -> None:
    assert _find_in_record(SLEEP, "sequence number: 26 missing ranks: {1} input sizes: [[4]]") == "rank"
    assert _find_in_record(SLEEP, "missing ranks: {0}") == "nothing"
    assert _find_in_record(SLEEP, "missing ranks: {1} collective stack trace: f at train.py:3") == "line"
    assert _find_in_record(BOTH, "error msg: Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH") == "rank"
    assert _find_in_record(SLEEP, "") == "nothing"


FAILED = """\
[rank0]:E1123 torch/distributed/debug/_frontend.py:443] Exception in frontend server when handling /fr_trace
[rank0]:E1123 torch/distributed/debug/_frontend.py:443] KeyError: ('0', 0)
[rank0]:I1123 torch/distributed/debug/_frontend.py:334] ::1 code 500, message Exception: KeyError(('0', 0))
[rank0]: RuntimeError: Timed out waiting 25000ms for recv operation to complete
"""


def test_what_the_server_says_of_itself_is_not_the_jobs() -> None:
    assert _recorded(FAILED) == "its analysis failed: KeyError(('0', 0))"
    assert _find_in_record(SLEEP, _recorded(FAILED)) == "nothing"
    assert _without_server(FAILED) == "[rank0]: RuntimeError: Timed out waiting 25000ms for recv operation to complete"


def test_the_script_for_torch_has_its_lines_where_they_were() -> None:
    for fault in EVERY:
        script = _script_of_torch(fault.script, 25.0, 25999)
        assert len(script.splitlines()) == len(fault.script.splitlines())
        assert script.count("start_debug_server(25999") == 1, fault.name
        assert "px." not in script
        compile(script, "train.py", "exec")


TIMED_OUT = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "train.py", line {line}, in <module>
[rank{rank}]: RuntimeError: Timed out waiting 25000ms for recv operation to complete
Root Cause (first observed failure): exitcode : 1
"""


def test_tracebacks_are_right_if_they_are_of_the_rank_to_blame() -> None:
    assert find_in_tracebacks(SLEEP, TIMED_OUT.format(rank=0, line=5)) == "nothing"
    assert find_in_tracebacks(SLEEP, TIMED_OUT.format(rank=1, line=5)) == "rank"
    assert find_in_tracebacks(SLEEP, TIMED_OUT.format(rank=1, line=3)) == "line"
    both = TIMED_OUT.format(rank=0, line=1) + TIMED_OUT.format(rank=1, line=2)
    assert find_in_tracebacks(BOTH, both) == "line"
    assert find_in_tracebacks(BOTH, TIMED_OUT.format(rank=0, line=1)) == "nothing"


def test_a_report_is_right_with_rank_and_line_or_cause() -> None:
    at_line = "rank 1 is at train.py:3; rank 0 waits for 11 s in all_reduce 26"
    assert find_in_report(SLEEP, at_line) == "line"
    assert find_in_report(SLEEP, at_line.replace(":3", ":4")) == "rank"
    assert find_in_report(SLEEP, "rank 0 is at train.py:3; rank 1 waits") == "nothing"
    quota = next(fault for fault in LIMITS if fault.needs == "quota")
    slow = "rank 0 waited 9 s an hour for rank 1 (90% of the time): "
    assert find_in_report(quota, slow + "its cgroup was throttled 90% of the time") == "line"
    assert find_in_report(quota, slow + "it slept") == "rank"
    assert find_in_report(quota, slow.replace("rank 1", "rank 0")) == "nothing"
