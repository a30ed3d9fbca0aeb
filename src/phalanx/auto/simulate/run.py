"""`simulate_run`: simulate a step of a transformer run spec (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.auto.cost.constants import DEFAULT, Constants
from phalanx.auto.predict.memory_model import (
    block_bytes,
    compute_stage_footprint,
    count_parameters,
    logits_bytes,
    recomputed_bytes,
)
from phalanx.auto.predict.run_file import read_run
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.predict.step_seconds import StepSeconds
from phalanx.auto.simulate.events import simulate
from phalanx.auto.simulate.values import PassWork, PipelineSpec, SimulatedStep, StageWork


def simulate_run(run: RunSpec | Mapping[str, Any], constants: Constants = DEFAULT) -> SimulatedStep:
    """Return one step of a run spec, event by event.

    Args:
        run: A `RunSpec`, or a mapping, as `predict` takes them.
        constants: The physical quantities to compute with.

    Raises:
        ConfigError: If the run cannot be; says which key, what was found and what is known.
        PlanError: If the schedule does not take so many stages a rank or micro-batches.
    """
    run = run if isinstance(run, RunSpec) else read_run(run)
    step = simulate(build_pipeline(run, constants))
    return SimulatedStep(
        name=run.name,
        simulation=step,
        per_s=run.batch.whole * run.model.seq / step.step_time_s,
        unit="tokens",
        usd_per_hour=run.cluster.usd_per_hour,
    )


def build_pipeline(run: RunSpec, constants: Constants = DEFAULT) -> PipelineSpec:
    """Return what the stages of a run do and hold. A smaller last micro-batch counts as a full one.

    The embedding is on the first stage, the projection to the vocabulary and the loss are on the last.
    """
    par, seconds = run.parallel, StepSeconds(run, constants)
    schedule = run.order
    count = par.pp * schedule.virtual
    blocks = seconds.stage_blocks
    mine = [[stage for stage in range(count) if schedule.holder(stage, par.pp) == rank] for rank in range(par.pp)]
    weights = [_weights(run, seconds, blocks, stages) for stages in mine]
    footprint, most = compute_stage_footprint(run), count_parameters(run)
    by_weight = footprint.parameters + footprint.gradients + footprint.optimizer
    return PipelineSpec(
        schedule=schedule,
        ranks=par.pp,
        rules=run.order_rules,
        stages=tuple(_stage(run, seconds, blocks, stage) for stage in range(count)),
        persistent_bytes=tuple(
            by_weight * own / most
            + footprint.gathered
            + footprint.workspace
            + (logits_bytes(run) if count - 1 in stages else 0)
            for own, stages in zip(weights, mine, strict=True)
        ),
        optimizer=tuple(seconds.optimizer * own / most + constants.step_s for own in weights),
        opening=seconds.replica_exchange.opening,
        closing=_last_collectives(run, seconds),
        contention=constants.contention,
        overlaps_sends=run.overlap.pp,
        # torch scatters when all backward passes of a stage are through, and waits for it
        overlaps_gradients=run.overlap.dp and par.zero < 2,
        copies=par.ranks // par.pp,
    )


def _weights(run: RunSpec, seconds: StepSeconds, blocks: list[int], stages: Iterable[int]) -> float:
    """Return the parameters of a rank that holds these stages."""
    edge, last = run.model.vocab * run.model.hidden / run.parallel.tp, len(blocks) - 1
    edges = {"embedding" if stage == 0 else "head" for stage in stages if stage in (0, last)}
    if {0, last} <= set(stages):  # both on one rank
        edges = {"embedding"} if run.model.tied else {"embedding", "head"}
    return sum(blocks[stage] for stage in stages) * seconds.parameters / seconds.layers + len(edges) * edge


def _stage(run: RunSpec, seconds: StepSeconds, blocks: list[int], stage: int) -> StageWork:
    own, is_last = blocks[stage], stage == len(blocks) - 1
    head = seconds.head if is_last else None
    backward = own * seconds.compute_backward + (head.backward if head else 0.0)
    if stage == 0:
        backward += seconds.embedding_backward
    apart = own * seconds.weights + (head.weights if head else 0.0)
    collectives_forward, collectives_backward = seconds.collectives
    exposed_forward = seconds.forward - seconds.compute_forward
    exposed_backward = seconds.backward - seconds.compute_backward
    return StageWork(
        forward=PassWork(
            compute=own * seconds.compute_forward
            + (head.forward if head else 0.0)
            + seconds.constants.micro_batch_s / run.parallel.vpp,
            exposed=own * exposed_forward
            + (seconds.exchanges.vocabulary_sum if stage == 0 else 0.0)
            + (seconds.table_waits[0] if is_last else 0.0),
            beside=own * max(0.0, collectives_forward - exposed_forward),
        ),
        inputs=PassWork(
            compute=backward - apart,
            exposed=own * exposed_backward
            + (seconds.exchanges.vocabulary_sum + seconds.table_waits[1] if is_last else 0.0),
            beside=own * max(0.0, collectives_backward - exposed_backward),
        ),
        weights=PassWork(compute=apart),
        activation_bytes=own * block_bytes(run),
        workspace_bytes=recomputed_bytes(run) if own else 0.0,
        send=seconds.send_once,
        added_to_first=seconds.replica_exchange.added_to_first_pass(stage),
        buckets=_buckets(run, seconds, own, is_first=stage == 0, is_last=is_last),
    )


def _last_collectives(run: RunSpec, seconds: StepSeconds) -> tuple[float, ...]:
    """Return the seconds of each rank's collectives after all passes: last scatters, and sums of tied tables."""
    par = run.parallel
    if par.pp == 1:
        return (seconds.last_scatters if par.zero >= 2 else 0.0,)
    return tuple(seconds.exchanges.sum_of_tied_tables if rank in (0, par.pp - 1) else 0.0 for rank in range(par.pp))


def _buckets(run: RunSpec, seconds: StepSeconds, blocks: int, *, is_first: bool, is_last: bool) -> tuple[float, ...]:
    """Return the seconds to reduce each bucket, a block's gradients or an embedding's, the last block's first."""
    par, exchanges = run.parallel, seconds.exchanges
    if par.dp * par.cp == 1 or (par.zero >= 2 and par.pp == 1):  # each backward pass scatters its own
        return ()
    reduce = exchanges.scatter_of if par.zero >= 2 else exchanges.reduce_of
    block, edge = sum(map(reduce, exchanges.block_parameters)), reduce(exchanges.table)
    has_head = is_last and not (run.model.tied and run.has_one_end)
    return (edge,) * has_head + (block,) * blocks + (edge,) * is_first
