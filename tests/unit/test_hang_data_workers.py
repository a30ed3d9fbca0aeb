"""What a hang report says of the data workers of a rank: where each is, and what keeps it from continuing."""

from __future__ import annotations

import pytest

from phalanx.launch.hang import observe
from phalanx.launch.hang.processes import ProcessState
from phalanx.launch.hang.stacks import Frame, Stacks, ThreadStack

_LOOP = Frame(file="torch/utils/data/_utils/worker.py", line=1, function="_worker_loop")


def _stacks_at(line: int) -> Stacks:
    frames = (Frame(file="/data.py", line=line, function="Images.__getitem__"), _LOOP)
    return Stacks(threads=(ThreadStack(name="", frames=frames, is_main=True, holds_lock=False),))


def test_workers_are_listed_by_their_place_and_a_stopped_one_by_its_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {11: 20, 12: 20, 13: 30, 14: 20}
    monkeypatch.setattr(observe.proc, "children", lambda pid: list(lines))
    monkeypatch.setattr(observe, "state_of", lambda pid: ProcessState(letter="T" if pid == 14 else "S", cpu_ns=0))
    monkeypatch.setattr(observe, "troubles_of", lambda pid, state: ["it is stopped"] if state.is_stopped else [])
    monkeypatch.setattr(observe, "read_stacks", lambda pid: _stacks_at(lines[pid]))
    assert observe._troubles_of_workers(10) == [
        "its data worker (pid 14): it is stopped",
        "its data worker (pid 11, 12) is at /data.py:20 in Images.__getitem__",
        "its data worker (pid 13) is at /data.py:30 in Images.__getitem__",
    ]
