"""The order of micro-batches through stages is that of torch's schedules, which run them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from phalanx.errors import PlanError
from phalanx.plan.pipeline_order import Action, Pass, order_of
from phalanx.plan.value import Schedule

SIZES = [(1, 1), (1, 4), (2, 2), (2, 6), (3, 3), (4, 4), (4, 8), (4, 10), (4, 24), (8, 16), (8, 40)]


def recorded(kind: str, stage: int, ranks: int, microbatches: int) -> list[Action]:
    """Return what torch's schedule of one stage a rank has that stage do, by running it over a stage that notes."""
    done: list[Action] = []
    noting: Any = SimpleNamespace(
        num_stages=ranks,
        stage_index=stage,
        has_backward=True,
        is_first=stage == 0,
        is_last=stage == ranks - 1,
        clear_runtime_states=lambda: None,
        perform_reduce_grad=lambda scale: None,
        forward_one_chunk=lambda number, *_, **__: done.append(Action(Pass.FORWARD, stage, number)),
        backward_one_chunk=lambda number, **_: done.append(Action(Pass.BACKWARD, stage, number)),
        **{f"get_{way}_{end}_ops": lambda number: [] for way in ("fwd", "bwd") for end in ("recv", "send")},
    )
    schedule: Any = (ScheduleGPipe if kind == "gpipe" else Schedule1F1B)(noting, microbatches)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return done


def of_torch(kind: str, ranks: int, virtual: int, microbatches: int) -> list[list[Action]]:
    """Return the order of torch's own schedule, without idle slots and communication."""
    if kind in ("gpipe", "1f1b"):
        return [recorded(kind, stage, ranks, microbatches) for stage in range(ranks)]
    stages: list[Any] = [
        SimpleNamespace(
            group_size=ranks,
            group_rank=0,
            num_stages=ranks * virtual,
            stage_index=ranks * index,
            stage_index_to_group_rank={stage: stage % ranks for stage in range(ranks * virtual)},
            submod=None,
            has_backward=True,
            is_first=index == 0,
            is_last=False,
            device="cpu",
        )
        for index in range(virtual)
    ]
    kinds = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
    schedule: Any = ScheduleZBVZeroBubble if kind == "zero_bubble" and virtual == 2 else kinds[kind]
    table = schedule(stages, microbatches).pipeline_order
    return [
        [
            Action(Pass(one.computation_type.value), one.stage_index, one.microbatch_index)
            for one in table[rank]
            if one is not None and one.computation_type.value in list(Pass)
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize(
    ("kind", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1), ("zero_bubble", 2)],
)
def test_the_order_is_the_one_torch_runs(kind: Any, virtual: int, ranks: int, microbatches: int) -> None:
    ours = order_of(Schedule(kind=kind, virtual=virtual, microbatches=microbatches), ranks)
    assert ours == of_torch(kind, ranks, virtual, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (4, 3), (8, 2)])
def test_fewer_micro_batches_than_stages_all_go_forward_first(ranks: int, microbatches: int) -> None:
    # As `parallel/pipeline/schedule` runs them: torch's 1F1B refuses so few.
    found = order_of(Schedule(kind="1f1b", microbatches=microbatches), ranks)
    assert found == of_torch("gpipe", ranks, 1, microbatches)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(("ranks", "microbatches"), [*SIZES, (4, 1), (8, 3)])
def test_every_stage_runs_every_pass_of_every_micro_batch_once(kind: Any, ranks: int, microbatches: int) -> None:
    for virtual in (1,) if kind in ("gpipe", "1f1b") else (1, 2):
        schedule = Schedule(kind=kind, virtual=virtual, microbatches=microbatches)
        kinds = "FIW" if kind == "zero_bubble" else "FB"
        expected = {Action(Pass(k), s, m) for k in kinds for s in range(ranks * virtual) for m in range(microbatches)}
        found = order_of(schedule, ranks)
        assert sum(map(len, found)) == len(expected)
        assert {action for actions in found for action in actions} == expected
        assert all(schedule.holder(a.stage, ranks) == rank for rank, actions in enumerate(found) for a in actions)


def test_what_a_schedule_does_not_take_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"gpipe has one stage a rank, asked for 2\. Choose interleaved"):
        order_of(Schedule(kind="gpipe", virtual=2), 4)
    with pytest.raises(PlanError, match=r"9 do not make 2\. Choose a multiple of 4"):
        order_of(Schedule(kind="interleaved", virtual=2, microbatches=9), 4)
