"""A planner's candidate as events: layer by layer on one rank, or micro-batch by micro-batch through stages (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from phalanx.auto.capture.layers import Layers
from phalanx.auto.cost.machine_model import Speed
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.auto.planner.candidate_cost import borders_of, collectives_of, options_of, stages_of
from phalanx.auto.planner.planner import Candidate
from phalanx.auto.simulate.events import simulate
from phalanx.auto.simulate.values import Pipeline, Simulated, StageWork, Work
from phalanx.auto.solver.problem import Option
from phalanx.plan.value import Schedule


def simulate_plan(candidate: Candidate, layers: Layers, work: LayerWork, speed: Speed) -> Simulated:
    """Return one step of a candidate, event by event.

    Without stages every layer is simulated by itself, with its exchange of gradients beside the backward passes of the
    layers before it. With stages a pass of a stage is one event; gradients are exchanged once, after all passes.

    Args:
        candidate: What the planner chose.
        layers: The model it chose for.
        work: What its segments take.
        speed: How fast the ranks are.
    """
    options = options_of(candidate, layers, work, speed)
    waits = collectives_of(candidate, layers, speed)
    in_stages = candidate.arrangement.stages > 1
    if in_stages:
        pipeline = _staged(candidate, layers, options, waits, speed)
    else:
        pipeline = _layered(candidate, options, waits, speed)
    step = simulate(pipeline)
    return Simulated(
        name=f"{dict(layers.captured.modules)['']}, {candidate.arrangement}",
        simulation=step,
        per_s=candidate.arrangement.rows / step.step_time_s,
        unit="rows",
        layers=() if in_stages else tuple(one.path or one.kind for one in layers.segments),
    )


def _layered(candidate: Candidate, options: Sequence[Option], waits: Sequence[Option], speed: Speed) -> Pipeline:
    """Return a rank whose layers are stages of its own, one after another."""
    stages = tuple(_work((one,), (wait,)) for one, wait in zip(options, waits, strict=True))
    return Pipeline(
        schedule=Schedule(kind="interleaved", virtual=len(stages)),
        ranks=1,
        stages=stages,
        held=(sum(one.held for one in options),),
        optimizer=(sum(one.update_s for one in options),),
        contention=speed.contention,
        waits_contend=True,
        copies=candidate.arrangement.ranks,
    )


def _staged(
    candidate: Candidate, layers: Layers, options: Sequence[Option], waits: Sequence[Option], speed: Speed
) -> Pipeline:
    at, stage_of = candidate.arrangement, stages_of(candidate, layers)
    schedule = Schedule(kind=at.schedule, virtual=at.virtual, microbatches=at.micro_batches)
    count = at.stages * at.virtual
    mine = [[place for place, stage in enumerate(stage_of) if stage == one] for one in range(count)]
    works = [_work([options[i] for i in those], [waits[i] for i in those]) for those in mine]
    borders = [*(speed.collective_s("send", size, at.over_stages) for size in borders_of(candidate, layers)), 0.0]
    # The first has no gradients of inputs to compute before others.
    owed = [sum(options[i].owed for i in those) if stage else 0.0 for stage, those in enumerate(mine)]
    held, update = [0.0] * at.stages, [0.0] * at.stages
    for option, stage in zip(options, stage_of, strict=True):
        held[schedule.holder(stage, at.stages)] += option.held
        update[schedule.holder(stage, at.stages)] += option.update_s
    return Pipeline(
        schedule=schedule,
        ranks=at.stages,
        stages=tuple(replace(one, send=send, owed=due) for one, send, due in zip(works, borders, owed, strict=True)),
        held=tuple(held),
        optimizer=tuple(update),
        overlaps_sends=False,
        holds_receivers=True,
        overlaps_gradients=False,
        copies=at.data * at.model,
    )


def _work(options: Iterable[Option], waits: Iterable[Option]) -> StageWork:
    """Return what some segments do and hold together."""
    options, waits = tuple(options), tuple(waits)
    forward, backward = sum(one.forward_s for one in waits), sum(one.backward_s for one in waits)
    weights = sum(one.weights_s for one in options)
    return StageWork(
        forward=Work(compute=max(0.0, sum(one.forward_s for one in options) - forward), exposed=forward),
        inputs=Work(compute=max(0.0, sum(one.backward_s for one in options) - backward - weights), exposed=backward),
        weights=Work(compute=weights),
        kept=sum(one.kept for one in options),
        again=max(one.working for one in options),
        buckets=tuple(one.exchange_s for one in reversed(options) if one.exchange_s),
    )
