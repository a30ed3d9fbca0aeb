"""`order_of`: order of forward and backward passes per rank for each pipeline schedule, equal to torch's (pure).

`parallel/pipeline/schedule` has torch run a schedule; what asks beforehand how long it takes, or how much it holds,
asks here. A test holds the two together.

Sources: GPipe, Y. Huang et al., NeurIPS 2019; 1F1B and interleaved, D. Narayanan et al., SC 2021; zero bubble, P. Qi et
al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from phalanx.errors import PlanError
from phalanx.plan.value import Schedule


class Pass(StrEnum):
    """What a rank does with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and of weights."""

    INPUTS = "I"
    """Gradients of inputs alone, which the stage before waits for."""

    WEIGHTS = "W"
    """Gradients of weights alone, which nobody waits for."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Pass
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class OrderRules:
    """What training software other than Phalanx orders otherwise."""

    round_size: int = 0
    """Micro-batches that a rank takes through one of its stages before the next; the last round may have fewer. 0:
    torch's rounds, all of one size."""

    few_in_turn: bool = False
    """Whether 1F1B alternates passes with fewer micro-batches than stages too; else all go forward first."""

    all_forward_first: bool = False
    """Whether interleaved stages take all micro-batches forward before one goes back."""


TORCH_RULES = OrderRules()


def order_of(schedule: Schedule, ranks: int, rules: OrderRules = TORCH_RULES) -> list[list[Action]]:
    """Return the actions of every rank along the stage axis, in order.

    Args:
        schedule: Its `kind`, `microbatches` and `virtual` count; a job without a schedule is 1F1B with one stage.
        ranks: Size of the stage axis.
        rules: Those of the software.

    Raises:
        PlanError: If the schedule does not take so many stages a rank or micro-batches.
    """
    return [rank_order(schedule, rank, ranks, rules) for rank in range(ranks)]


def rank_order(schedule: Schedule, rank: int, ranks: int, rules: OrderRules = TORCH_RULES) -> list[Action]:
    """Return the actions of one rank, as `order_of` does."""
    _check(schedule, ranks, rules)
    if (not rules.few_in_turn and is_gpipe(schedule, schedule.microbatches, ranks)) or schedule.kind == "gpipe":
        return _gpipe(rank, schedule.microbatches)
    if schedule.is_v:
        return _zero_bubble_v(rank, ranks, schedule.microbatches)
    return _one_forward_one_backward(schedule, rank, ranks, rules)


def is_gpipe(schedule: Schedule, microbatches: int, ranks: int) -> bool:
    """Return whether all micro-batches go forward before one goes back: 1F1B needs one for each of its stages."""
    return schedule.kind == "gpipe" or (schedule.kind in ("1f1b", "none") and microbatches < ranks)


def _check(schedule: Schedule, ranks: int, rules: OrderRules) -> None:
    if schedule.kind in ("gpipe", "1f1b", "none") and schedule.virtual > 1:
        raise PlanError(
            f"The schedule {schedule.kind} has one stage a rank, asked for {schedule.virtual}. Choose interleaved or "
            "zero_bubble, or one stage a rank."
        )
    rounds = _rounds(schedule, ranks)
    has_rounds = schedule.kind in ("interleaved", "zero_bubble") and not schedule.is_v and not rules.round_size
    if has_rounds and schedule.microbatches % rounds:
        raise PlanError(
            f"The schedule {schedule.kind} over {ranks} ranks takes micro-batches in rounds of one size, and "
            f"{schedule.microbatches} do not make {rounds}. Choose a multiple of {ranks}."
        )


def _rounds(schedule: Schedule, ranks: int) -> int:
    return max(1, schedule.microbatches // ranks)


def _gpipe(rank: int, microbatches: int) -> list[Action]:
    return [
        Action(kind, rank, microbatch) for kind in (Pass.FORWARD, Pass.BACKWARD) for microbatch in range(microbatches)
    ]


def _one_forward_one_backward(schedule: Schedule, rank: int, ranks: int, rules: OrderRules) -> list[Action]:
    """Return forward passes until the first gradient can be back, then one of each, then what is left.

    A rank with several stages takes a round of micro-batches through the first, then through the second, and so on.
    With `zero_bubble`, gradients of weights follow as many passes later as the rank has idle slots to fill at the end.
    """
    virtual, total = schedule.virtual, schedule.microbatches * schedule.virtual
    splits, size = schedule.kind == "zero_bubble", schedule.microbatches // _rounds(schedule, ranks)
    size = min(rules.round_size or size, schedule.microbatches)

    def nth(kind: Pass, number: int) -> Action:
        before = number // (size * virtual) * size  # micro-batches of earlier rounds
        turn, index = divmod(number - before * virtual, min(size, schedule.microbatches - before))
        chunk = turn if kind is Pass.FORWARD else virtual - 1 - turn
        return Action(kind, chunk * ranks + rank, before + index)

    hop = 2 if schedule.kind == "interleaved" else 1
    ahead = min((virtual - 1) * size + hop * (ranks - 1 - rank), total)
    if rules.all_forward_first:
        ahead = total
    actions = [nth(Pass.FORWARD, number) for number in range(ahead)]
    for number in range(total):
        if ahead + number < total:
            actions.append(nth(Pass.FORWARD, ahead + number))
        actions.append(nth(Pass.INPUTS if splits else Pass.BACKWARD, number))
        if splits and number >= rank:
            actions.append(nth(Pass.WEIGHTS, number - rank))
    if splits:
        actions += [nth(Pass.WEIGHTS, number) for number in range(max(0, total - rank), total)]
    return actions


def _zero_bubble_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return the order of two stages a rank that lie as a V: the rank that begins with the first ends with the last.

    Written for at least as many micro-batches as fill the V; those that are not there are left out.
    """
    down, up = rank, 2 * ranks - 1 - rank
    count = max(2 * ranks - 1, microbatches)
    done: dict[tuple[Pass, int], int] = {}

    def following(kind: Pass, stage: int) -> Action:
        number = done.get((kind, stage), 0)
        done[kind, stage] = number + 1
        return Action(kind, stage, number)

    def whole_backward(stage: int) -> tuple[Action, Action]:
        return following(Pass.INPUTS, stage), following(Pass.WEIGHTS, stage)

    actions = [following(Pass.FORWARD, down) for _ in range(2 * (ranks - rank) - 1)]
    for _ in range(rank):
        actions += [following(Pass.FORWARD, up), following(Pass.FORWARD, down)]
    for _ in range(ranks - rank):
        actions += [following(Pass.FORWARD, up), *whole_backward(up)]
    while done.get((Pass.FORWARD, up), 0) < count:
        if done[Pass.FORWARD, down] < count:
            actions.append(following(Pass.FORWARD, down))
        actions += [*whole_backward(down), following(Pass.FORWARD, up), *whole_backward(up)]
    for _ in range(rank):
        actions += [following(Pass.INPUTS, down), following(Pass.INPUTS, up)]
    for _ in range(ranks - rank):
        actions += whole_backward(down)
    left = ((stage, count - done.get((Pass.WEIGHTS, stage), 0)) for stage in (up, down))
    actions += chain.from_iterable([following(Pass.WEIGHTS, stage) for _ in range(number)] for stage, number in left)
    return [action for action in actions if action.microbatch < microbatches]
