"""Ranks that differ find out before they train, all with the same words."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx as px
from phalanx import comm
from phalanx.comm import agreement, crossed, process_group
from phalanx.errors import ConfigError, PeerLostError
from ranks import run_ranks

pytestmark = pytest.mark.dist


def _agree_on_equal_values() -> int:
    px.init()
    for _ in range(3):
        agreement.agree("plan", {"b": [1, 2], "a": None})
    agreement.barrier()
    return px.comm.share("seed", px.current().rank + 5)


def test_equal_values_pass_and_rank_0s_value_reaches_all():
    assert run_ranks(_agree_on_equal_values, 3) == [5, 5, 5]


def _agree_on_different_values() -> list[str]:
    rank = px.init().rank
    values = [
        ("plan", {"step": {"accumulate": 4 if rank == 2 else 2}, "axes": ["data"]}),
        ("batch size", 32 + rank % 2),
        ("model", {"w": [3, 3]} if rank else {"w": [3, 3], "extra": [1]}),
    ]
    messages = []
    for name, value in values:
        with pytest.raises(ConfigError) as caught:
            agreement.agree(name, value)
        messages.append(str(caught.value))
    return messages


def test_a_difference_is_the_same_error_on_every_rank_and_names_key_and_ranks():
    told = run_ranks(_agree_on_different_values, 3)
    assert told[0] == told[1] == told[2]
    plan, batch, model = told[0]
    assert "plan.step.accumulate must be the same on all ranks, found 2 on ranks 0, 1; 4 on rank 2." in plan
    assert "batch size must be the same on all ranks, found 32 on ranks 0, 2; 33 on rank 1." in batch
    assert "model.extra[0] must be the same on all ranks, found 1 on rank 0; nothing on ranks 1, 2." in model


def _at_different_points() -> str:
    rank = px.init().rank
    with pytest.raises(ConfigError) as caught:
        agreement.agree("model" if rank else "optimizer", 1)
    return str(caught.value)


def test_ranks_at_different_calls_are_told_so():
    told = run_ranks(_at_different_points, 2)
    assert told[0] == told[1]
    assert "Ranks are at different points of the script: optimizer on rank 0; model on rank 1." in told[0]


def _wait_for_a_dead_rank() -> str:
    if px.init().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        agreement.agree("plan", 1, timeout_s=1.0)
    return str(caught.value)


def test_a_dead_rank_is_named_with_host_pid_and_log():
    survivor, _ = run_ranks(_wait_for_a_dead_rank, 2, expect_failure=True)
    assert "waited 1 s for rank 1 (host " in survivor.value
    assert "workerlog.1), which did not come to 'plan'. It has ended or hangs" in survivor.value


def _call_alone() -> None:
    rank, store = px.init().rank, process_group.meeting().store
    agreement.SAY_EVERY_S = 0.2
    if rank == 1:
        assert store.wait(["given up"], 30)
        return
    with pytest.raises(PeerLostError):
        agreement.agree("px.save", 1, timeout_s=0.5)
    store.set("given up", "")


def test_a_call_that_some_ranks_leave_out_is_named_while_the_others_wait():
    first, _ = run_ranks(_call_alone, 2, expect_failure=True)
    assert re.search(
        r"waiting for rank 1 .* since 0 s, at 'px.save', which only rank 0 called so far: call it on all ranks",
        first.output,
    )


def _save_on_one_rank(verb: str, folder: str) -> tuple[str, float]:
    """Return the error, and the seconds from the call on rank 0 to it."""
    context = px.init()
    model = torch.nn.Linear(4, 2)
    dist.all_reduce(torch.ones(1))
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        if context.rank == 0:
            px.save(folder, model) if verb == "save" else px.comm.barrier("epoch")
        with comm.labels.label_calls("the gradients"):
            dist.all_reduce(torch.ones(12))
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(("verb", "call"), [("save", "px.save"), ("barrier", "epoch")])
def test_a_call_on_one_rank_while_another_trains_on_is_an_error_at_once_on_both(tmp_path: Path, verb: str, call: str):
    (first, first_s), (second, second_s) = run_ranks(_save_on_one_rank, 2, verb, str(tmp_path / "run"))
    assert re.fullmatch(
        rf"rank 0 \(host .*\) waits in {call}, and rank 1 \(host .*\) waits in all_reduce sum of 12 float32 for the "
        rf"gradients: each waits for the other .* Call {call} on every rank, at the same place: .*",
        first,
    )
    assert second == first
    assert max(first_s, second_s) < 10 * crossed.PATIENCE_S, "not at the deadline"


def _slow_collective_elsewhere() -> float:
    """Rank 1 makes a call late, of which rank 0 knows: nothing is wrong."""
    context = px.init()
    work = dist.all_reduce(torch.ones(3), async_op=True) if context.rank == 0 else None
    if context.rank == 1:
        time.sleep(2.0)
        dist.all_reduce(torch.ones(3))
    agreement.barrier("epoch")
    if work is not None:
        work.wait()
    return px.comm.share("rank", context.rank)


def test_ranks_that_are_late_but_make_the_same_calls_are_left_alone():
    assert run_ranks(_slow_collective_elsewhere, 2) == [0, 0]


def _share_without_rank_0() -> str:
    rank, store = px.init().rank, process_group.meeting().store
    if rank == 0:
        assert store.wait(["given up"], 30)
        return ""
    agreement.SAY_EVERY_S = 0.2
    with pytest.raises(PeerLostError) as caught:
        comm.share("seed", None, timeout_s=0.5)
    store.set("given up", "")
    return str(caught.value)


def test_a_share_that_rank_0_never_makes_names_rank_0():
    _, other = run_ranks(_share_without_rank_0, 2, expect_failure=True)
    assert "rank 0 (host " in other.value
    assert re.search(r"waiting for rank 0 \(host .*workerlog\.0\) since 0 s, at 'seed'", other.output)


def test_with_one_process_agreement_is_free_and_still_wants_json():
    agreement.agree("plan", {"a": 1})
    agreement.barrier()
    assert agreement.share("seed", {"a": (1, 2)}) == {"a": [1, 2]}
    with pytest.raises(ConfigError, match="plan must be made of JSON values"):
        agreement.agree("plan", object())
