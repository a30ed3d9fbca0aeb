"""The harness itself: it must never hang, hide a failure or leave a process."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailedError, run_ranks

pytestmark = pytest.mark.dist


def _sum_of_ranks(extra: int) -> float:
    dist.init_process_group("gloo", init_method="env://")
    x = torch.tensor([float(dist.get_rank() + extra)])
    dist.all_reduce(x)
    return x.item()


def _raise_on_rank_1() -> str:
    if os.environ["RANK"] == "1":
        raise ValueError("wrong on purpose")
    return "fine"


def _die_on_rank_1() -> str:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    print("a line of output", file=sys.stderr)
    return "fine"


def _hang_on_rank_0() -> None:
    if os.environ["RANK"] == "0":
        threading.Event().wait()


def test_results_come_back_in_rank_order_from_a_plain_env_group():
    assert run_ranks(_sum_of_ranks, 2, 10) == [21.0, 21.0]


def test_a_rank_that_raises_fails_the_test_with_its_traceback():
    with pytest.raises(RankFailedError, match=r"(?s)1 of 2 ranks failed.*wrong on purpose"):
        run_ranks(_raise_on_rank_1, 2)


def test_an_expected_failure_is_returned_per_rank():
    fine, killed = run_ranks(_die_on_rank_1, 2, expect_failure=True)
    assert (fine.value, fine.failed, fine.exit_code) == ("fine", False, 0)
    assert "a line of output" in fine.output
    assert (killed.error_type, killed.exit_code) == ("Killed", -signal.SIGKILL)


def test_a_rank_that_hangs_is_killed_at_the_deadline_and_shows_where_it_was():
    hung, done = run_ranks(_hang_on_rank_0, 2, expect_failure=True, timeout_s=3.0)
    assert hung.error_type == "Timeout"
    assert "_hang_on_rank_0" in hung.output
    assert not done.failed
