"""A rank that dies or stops inside a collective over shared memory is named by the others, and nothing stays."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import phalanx as px
from phalanx.comm import shared_memory
from phalanx.comm.labels import label_calls
from phalanx.comm.shared_memory import native
from phalanx.errors import PeerLostError
from ranks import run_ranks

pytestmark = pytest.mark.fault

AT_ONCE_S = 3.0
"""Within this the others must know."""


def test_a_rank_killed_inside_a_collective_is_named_by_all_others_in_time():
    before = _left_behind()
    outcomes = run_ranks(_lose_rank_1, 3, expect_failure=True)
    assert outcomes[1].error_type == "Killed"
    for rank in (0, 2):
        waited, message = outcomes[rank].value
        assert waited < AT_ONCE_S
        assert "all_reduce, call 2 of the group, on rank " in message
        assert "lost rank 1 (host " in message
        assert "its process ended" in message
    assert _left_behind() == before


def _left_behind() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "phalanx" in path.name}


def _lose_rank_1() -> tuple[float, str]:
    rank = px.init().rank
    dist.all_reduce(torch.ones(1))
    # Many rounds, so that rank 1 dies while bytes move.
    x = torch.ones(20_000_000)
    if rank == 1:
        _kill_in(0.01)
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        dist.all_reduce(x)
    # The group stays broken, and says the same again.
    with pytest.raises(PeerLostError, match="lost rank 1"):
        dist.barrier()
    return time.monotonic() - started, str(caught.value)


def _kill_in(seconds: float) -> None:
    """Have this process ended by a signal while it is in the call that follows."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def test_a_rank_killed_before_its_message_is_named():
    outcome = run_ranks(_lose_the_sender, 2, expect_failure=True)[0]
    waited, message = outcome.value
    assert waited < AT_ONCE_S
    assert message.startswith("recv number 1 on rank 0 (host ")
    assert "lost rank 1 (host " in message


def _lose_the_sender() -> tuple[float, str]:
    rank = px.init().rank
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        dist.recv(torch.empty(3), 1)
    return time.monotonic() - started, str(caught.value)


def test_a_rank_that_ended_its_group_is_named():
    message = run_ranks(_leave_early, 2)[0]
    assert "lost rank 1 (host " in message
    assert "it left the group" in message


def _leave_early() -> str:
    shared_memory.register()
    dist.init_process_group("shm", init_method="env://")
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(PeerLostError) as caught:
        dist.barrier()
    return str(caught.value)


def test_a_stopped_rank_is_named_at_the_deadline():
    outcomes = run_ranks(_stop_rank_1, 2, expect_failure=True)
    waited, message = outcomes[0].value
    assert 1.0 <= waited < 1.0 + AT_ONCE_S
    assert "all_reduce, call 2 of the group, on rank 0 (" in message
    assert "Timed out waiting for rank 1 (" in message
    assert "which lives" in message
    # What rank 0 found holds for rank 1 too, once it continues.
    assert outcomes[1].error_type == "PeerLostError"
    assert "Timed out waiting for rank 1 (" in outcomes[1].message


def _stop_rank_1() -> tuple[float, str]:
    shared_memory.register()
    dist.init_process_group("shm", init_method="env://", timeout=timedelta(seconds=1))
    rank = dist.get_rank()
    pids = torch.zeros(2, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(3))
    started = time.monotonic()
    try:
        with pytest.raises(PeerLostError) as caught:
            dist.all_reduce(torch.ones(3))
    finally:
        os.kill(int(pids[1]), signal.SIGCONT)
    return time.monotonic() - started, str(caught.value)


def test_a_forked_child_cannot_speak_for_its_parent():
    assert run_ranks(_fork, 2) == [0, 0]


def _fork() -> int:
    px.init()
    dist.barrier()
    child = os.fork()
    if child == 0:
        try:
            dist.barrier()
        except RuntimeError as error:
            os._exit(0 if "forked process" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    dist.barrier()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_that_ends_as_scripts_do_leaves_the_group_to_its_parent():
    run_ranks(_fork_and_end, 2)


def _fork_and_end() -> None:
    rank = px.init().rank
    dist.barrier()
    if rank == 0:
        child = os.fork()
        if child == 0:
            px.shutdown()  # as at the end of an interpreter
            dist.destroy_process_group()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.5)  # longer than rank 1 takes to look whether rank 0 is there
    dist.barrier()
    px.comm.barrier()


def test_who_keeps_a_group_waiting_is_said_and_a_monitored_barrier_names_all_that_are_missing():
    outcomes = run_ranks(_wait_for_late_ranks, 3, env={"PHALANX_COLLECTIVE_TIMEOUT_S": "45"})
    line, message = outcomes[0]
    assert re.search(r"waiting since \d+ s: barrier for the test, call 1 of the group, on rank 0 \(", line)
    assert re.search(r"waits for rank 1 \(.*\), rank 2 \(", line)
    assert message.startswith("monitored_barrier: Timed out after 0.3 s: barrier")
    assert re.search(r"waits for rank 1 \(.*\), rank 2 \(", message)
    for late in outcomes[1:]:
        assert "Timed out waiting for rank 1 (" in late[1]


def _wait_for_late_ranks() -> tuple[str, str]:
    rank = px.init().rank
    world = dist.distributed_c10d._get_default_group()
    for group in (world, dist.new_group([0, 1, 2]), init_device_mesh("cpu", (3,)).get_group()):
        assert group._timeout == timedelta(seconds=45)
    assert dist.new_group([0, 1, 2], timeout=timedelta(seconds=7))._timeout == timedelta(seconds=7)
    store = world.get_group_store()
    lines: list[str] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            store.set("said", "")

    if rank == 0:
        native.SAY_AFTER_S = 0.05
        logging.getLogger("phalanx.comm").addHandler(Watch())
    else:
        store.wait(["said"])
    with label_calls("the test"):
        dist.barrier()
    if rank == 0:
        with pytest.raises(PeerLostError) as caught:
            world.monitored_barrier(timedelta(seconds=0.3))
        store.set("over", "")
        return lines[0], str(caught.value)
    store.wait(["over"])
    with pytest.raises(PeerLostError) as caught:
        dist.barrier()
    return "", str(caught.value)


def test_a_signal_interrupts_a_rank_that_waits_and_what_it_waits_for_still_comes():
    waited, total = run_ranks(_interrupted_wait, 2)[0]
    assert waited < AT_ONCE_S
    assert total == [2.0, 2.0]


def _interrupted_wait() -> tuple[float, list[float]]:
    rank = px.init().rank
    store = dist.distributed_c10d._get_default_group().get_group_store()
    both = torch.ones(2, 2)[:, 0]  # with gaps, so the sum lands in memory of the call first
    if rank == 1:
        store.wait(["interrupted"])
        dist.all_reduce(both)
        dist.barrier()
        return 0.0, both.tolist()
    start = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(both)
    waited = time.monotonic() - start
    store.set("interrupted", "")
    dist.barrier()
    deadline = time.monotonic() + AT_ONCE_S
    while both[0] != 2.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return waited, both.tolist()
