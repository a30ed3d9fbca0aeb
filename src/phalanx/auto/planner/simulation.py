"""`simulate_assignment`: simulate a step of an assignment event by event (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from phalanx.auto.capture.layers import Layers
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.cost.machine_model import MachineModel
from phalanx.auto.planner.assignment import Assignment, list_border_bytes, list_call_costs, list_comm_costs, list_stages
from phalanx.auto.simulate.events import simulate
from phalanx.auto.simulate.values import PassWork, PipelineSpec, SimulatedStep, StageWork
from phalanx.auto.solver.problem import StrategyCost, sum_in_blocks
from phalanx.plan.value import Schedule


def simulate_assignment(assignment: Assignment, work: LayerWork, usd_per_hour: float | None = None) -> SimulatedStep:
    """Return one step of what a Plan decides, event by event.

    Without stages every layer is simulated by itself, with its gradient synchronisation beside the backward passes of
    the layers before it. With stages a pass of a stage is one event; gradients are exchanged once, after all passes.

    Args:
        assignment: What a Plan decides.
        work: Of the model on a machine.
        usd_per_hour: Price of all devices; None if it is not known.
    """
    layers, machine = work.layers, work.machine
    options, waits = list_call_costs(assignment, work), list_comm_costs(assignment, work)
    in_stages = assignment.config.stages > 1
    if in_stages:
        pipeline = _build_stages(assignment, layers, options, waits, machine)
    else:
        blocks = [call.block for call in work.all]
        pipeline = _build_layers(assignment, _with_recomputed(options, blocks), waits, machine)
    step = simulate(pipeline)
    return SimulatedStep(
        name=f"{dict(layers.captured.modules)['']}, {assignment.config}",
        simulation=step,
        per_s=assignment.config.batch_size / step.step_time_s,
        unit="rows",
        usd_per_hour=usd_per_hour,
        layers=() if in_stages else tuple(call.path or call.kind for call in layers.calls),
    )


def _with_recomputed(options: Sequence[StrategyCost], blocks: Sequence[str]) -> list[StrategyCost]:
    """Return the costs of calls with what is computed again of their blocks, up to each, as its workspace."""
    sizes = sum_in_blocks([option.recomputed_bytes for option in options], blocks)
    return [
        replace(option, workspace_bytes=option.workspace_bytes + size)
        for option, size in zip(options, sizes, strict=True)
    ]


def _build_layers(
    assignment: Assignment, options: Sequence[StrategyCost], waits: Sequence[StrategyCost], machine: MachineModel
) -> PipelineSpec:
    """Return a rank whose layers are stages of its own, one after another."""
    stages = tuple(_work((cost,), (wait,)) for cost, wait in zip(options, waits, strict=True))
    return PipelineSpec(
        schedule=Schedule(kind="interleaved", virtual=len(stages)),
        ranks=1,
        stages=stages,
        persistent_bytes=(sum(cost.persistent_bytes - cost.late_bytes for cost in options),),
        update_bytes=(max(cost.update_bytes for cost in options),),
        optimizer=(sum(cost.update_s for cost in options),),
        contention=machine.contention,
        waits_contend=True,
        copies=assignment.config.ranks,
    )


def _build_stages(
    assignment: Assignment,
    layers: Layers,
    options: Sequence[StrategyCost],
    waits: Sequence[StrategyCost],
    machine: MachineModel,
) -> PipelineSpec:
    config, stage_of = assignment.config, list_stages(assignment, layers)
    schedule = Schedule(kind=config.schedule, virtual=config.virtual, microbatches=config.micro_batches)
    count = config.stages * config.virtual
    mine = [[i for i, stage in enumerate(stage_of) if stage == number] for number in range(count)]
    works = [_work([options[i] for i in those], [waits[i] for i in those]) for those in mine]
    crossing = list_border_bytes(assignment, layers)
    borders = [*(machine.collective_s("send", size, config.over_stages) for size in crossing), 0.0]
    # The first has no gradients of inputs to compute before others.
    deferred = [sum(options[i].deferred_bytes for i in those) if stage else 0.0 for stage, those in enumerate(mine)]
    persistent, update_s, update_bytes = ([0.0] * config.stages for _ in range(3))
    for option, stage in zip(options, stage_of, strict=True):
        rank = schedule.holder(stage, config.stages)
        persistent[rank] += option.persistent_bytes
        update_s[rank] += option.update_s
        update_bytes[rank] = max(update_bytes[rank], option.update_bytes)
    for stage, size in enumerate(crossing):
        for end in (stage, stage + 1):
            persistent[schedule.holder(end, config.stages)] += config.micro_batches * size
    return PipelineSpec(
        schedule=schedule,
        ranks=config.stages,
        stages=tuple(
            replace(work, send=send, deferred_bytes=due)
            for work, send, due in zip(works, borders, deferred, strict=True)
        ),
        persistent_bytes=tuple(persistent),
        update_bytes=tuple(update_bytes),
        optimizer=tuple(update_s),
        overlaps_sends=False,
        holds_receivers=True,
        overlaps_gradients=False,
        copies=config.data * config.model,
    )


def _work(options: Iterable[StrategyCost], waits: Iterable[StrategyCost]) -> StageWork:
    """Return what some calls do and hold together."""
    options, waits = tuple(options), tuple(waits)
    forward, backward = sum(cost.forward_s for cost in waits), sum(cost.backward_s for cost in waits)
    weights = sum(cost.weight_grad_s for cost in options)
    return StageWork(
        forward=PassWork(compute=max(0.0, sum(cost.forward_s for cost in options) - forward), exposed=forward),
        inputs=PassWork(
            compute=max(0.0, sum(cost.backward_s for cost in options) - backward - weights), exposed=backward
        ),
        weights=PassWork(compute=weights),
        activation_bytes=sum(cost.activation_bytes for cost in options),
        workspace_bytes=max(cost.workspace_bytes for cost in options),
        gradient_bytes=sum(cost.late_bytes for cost in options),
        buckets=tuple(cost.grad_sync_s for cost in reversed(options) if cost.grad_sync_s),
    )
