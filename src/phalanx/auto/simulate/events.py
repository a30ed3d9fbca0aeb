"""`simulate`: discrete-event simulation of a pipeline-parallel training step (pure).

Every rank has four streams: `compute`, the `collectives` of sharded layers and shards, `send` to neighbouring stages,
and the reduction of `gradients`. A rank runs its passes in the schedule's order, each as soon as the rank is free and
its input is there. Ranks that hold the same stages do the same and are simulated once. docs/design/simulate.md says
more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from phalanx.auto.simulate.gradients import GradientReduction
from phalanx.auto.simulate.values import PassWork, PipelineSpec, RankTime, Simulation, Slice
from phalanx.plan.pipeline_order import Action, Pass, order_of

WHOLE_ROUNDS = 8
"""Rounds of micro-batches (one round: as many as ranks) from which on not all are simulated one by one."""

_KEPT_ROUNDS = 6
_STEADY = 1e-9
"""Share of the step by which two rounds of the steady state may differ."""


def simulate(pipeline: PipelineSpec) -> Simulation:
    """Return a step of a pipeline, event by event.

    With many micro-batches, only as many are run one by one as it takes to be in the steady state, where every rank
    does in each round what it did in the round before, later by the same time.

    Raises:
        PlanError: If the schedule does not take so many stages or micro-batches.
    """
    count = pipeline.schedule.microbatches
    simulated_count = _KEPT_ROUNDS * pipeline.ranks
    while pipeline.schedule.kind != "gpipe" and simulated_count * WHOLE_ROUNDS <= count * _KEPT_ROUNDS:
        simulation = _simulate_steady(pipeline, simulated_count + count % pipeline.ranks)
        if simulation is not None:
            return simulation
        simulated_count *= 2
    return _Step(pipeline).run()


def _simulate_steady(pipeline: PipelineSpec, simulated_count: int) -> Simulation | None:
    """Return the step from one with fewer micro-batches; None if that does not come into a steady state."""
    ranks, schedule = pipeline.ranks, pipeline.schedule
    if schedule.kind != "1f1b" and schedule.microbatches % ranks:
        return None  # its rounds are not as many micro-batches as ranks
    fewer = schedule.model_copy(update={"microbatches": simulated_count})
    step = _Step(replace(pipeline, schedule=fewer))
    simulation = step.run()
    a_round = _steady_round(simulation)
    if a_round is None:
        return None
    rounds = (schedule.microbatches - simulated_count) // ranks
    seconds = simulation.step_time_s + rounds * a_round
    times = []
    for rank, rank_time in enumerate(simulation.ranks):
        moves = [move for (_, stage), move in step.moves.items() if schedule.holder(stage, ranks) == rank]
        busy = rank_time.busy + rounds * ranks * sum(move.work.compute for move in moves)
        sent = 0.0 if pipeline.overlaps_sends else sum(move.send for move in moves)
        waits = sent + sum(move.work.exposed + move.receive for move in moves)
        exposed = rank_time.exposed + rounds * ranks * waits
        times.append(RankTime(busy=busy, exposed=exposed, idle=max(0.0, seconds - busy - exposed)))
    left_out = schedule.microbatches - simulated_count
    return replace(simulation, pipeline=pipeline, step_time_s=seconds, ranks=tuple(times), left_out=left_out)


def _steady_round(simulation: Simulation) -> float | None:
    """Return by how much later every pass is than that of the round before; None if that is not the same for all.

    What a pass waits for is at most a round behind. So if two rounds of all passes are later by the same time, all that
    follow are, until the first rank has no forward pass left. Forward passes are ahead by one to two rounds.
    """
    ranks, middle = (
        simulation.pipeline.ranks,
        simulation.pipeline.schedule.microbatches // simulation.pipeline.ranks // 2,
    )
    starts = {item[2:5]: item.start for item in simulation.slices if item.stream == "compute" and item.stage >= 0}
    later = []
    for (kind, stage, microbatch), start in starts.items():
        first = middle - (1 if kind == Pass.FORWARD else 2)
        if first <= microbatch // ranks < first + 2:
            later.append(starts[kind, stage, microbatch + ranks] - start)
    return later[0] if max(later) - min(later) <= _STEADY * simulation.step_time_s else None


class _PassSpec(NamedTuple):
    """What is the same in all passes of one kind through one stage."""

    work: PassWork
    """Slowed down by the send beside it."""

    send: float
    """Seconds until the next rank has what the pass gives; 0 if nobody else needs it."""

    receive: float
    """Seconds that taking its input holds the rank up."""

    source_stage: int | None
    """The stage whose result it needs; None where it needs none of another stage."""

    target_stage: int | None
    """The stage that needs its result."""

    activation_bytes: float
    """Bytes more when it begins, or less when it ends if negative."""

    workspace_bytes: float
    """Bytes more while it runs."""

    gradient_bytes: float
    """Bytes more from its beginning on, of each micro-batch."""


def _build_pass(pipeline: PipelineSpec, kind: Pass, stage: int) -> _PassSpec:
    own, forward = pipeline.stages[stage], kind is Pass.FORWARD
    takes, gives = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
    there = range(len(pipeline.stages)) if kind is not Pass.WEIGHTS else range(0)
    holder = [pipeline.schedule.holder(index, pipeline.ranks) for index in range(len(pipeline.stages))]
    send = receive = 0.0
    if gives in there and holder[gives] != holder[stage]:
        send = pipeline.stages[min(stage, gives)].send
    if pipeline.holds_receivers and takes in there and holder[takes] != holder[stage]:
        receive = pipeline.stages[min(stage, takes)].send
    parts = {Pass.FORWARD: (own.forward,), Pass.INPUTS: (own.inputs,), Pass.WEIGHTS: (own.weights,)}
    works = parts.get(kind, (own.inputs, own.weights))
    compute, exposed = sum(index.compute for index in works), sum(index.exposed for index in works)
    if pipeline.overlaps_sends:
        compute += pipeline.contention * min(send, compute + exposed)
    activation = {
        Pass.FORWARD: own.activation_bytes,
        Pass.INPUTS: own.deferred_bytes,
        Pass.WEIGHTS: -own.activation_bytes - own.deferred_bytes,
    }
    return _PassSpec(
        work=PassWork(compute=compute, exposed=exposed, beside=min(compute, sum(index.beside for index in works))),
        send=send,
        receive=receive,
        source_stage=takes if takes in there else None,
        target_stage=gives if gives in there else None,
        activation_bytes=activation.get(kind, -own.activation_bytes),
        workspace_bytes=own.workspace_bytes if kind in (Pass.BACKWARD, Pass.INPUTS) else 0.0,
        gradient_bytes=own.gradient_bytes if kind in (Pass.BACKWARD, Pass.WEIGHTS) else 0.0,
    )


class _Step:
    """One run through the actions of all ranks."""

    def __init__(self, pipeline: PipelineSpec) -> None:
        self.pipeline = pipeline
        self.order = order_of(pipeline.schedule, pipeline.ranks, pipeline.rules)
        kinds = {(action.kind, action.stage) for actions in self.order for action in actions}
        self.moves = {(kind, stage): _build_pass(pipeline, kind, stage) for kind, stage in kinds}
        self.last = {a.stage: a for actions in self.order for a in actions if a.kind in (Pass.BACKWARD, Pass.WEIGHTS)}
        self.slices: list[Slice] = []
        self.free = [pipeline.opening] * pipeline.ranks
        self.port_free = [0.0] * pipeline.ranks
        self.reductions = [GradientReduction(pipeline.contention) for _ in range(pipeline.ranks)]
        self.busy, self.exposed = [0.0] * pipeline.ranks, [pipeline.opening] * pipeline.ranks
        self.changes: list[list[tuple[float, float]]] = [[(0.0, size)] for size in pipeline.persistent_bytes]
        self.given: dict[tuple[bool, int, int], float] = {}
        """When a stage's result is where it is needed, by whether it is of a forward pass, stage and micro-batch."""

    def run(self) -> Simulation:
        """Run every rank as far as its inputs let it, until all are through."""
        ranks = self.pipeline.ranks
        position, waiting = [0] * ranks, list(range(ranks))
        while waiting:
            rank = waiting.pop()
            began, actions = position[rank], self.order[rank]
            while position[rank] < len(actions) and self._act(rank, actions[position[rank]]):
                position[rank] += 1
            if position[rank] > began:  # a result may have reached a neighbour on the ring of ranks
                waiting += [other for other in ((rank + 1) % ranks, (rank - 1) % ranks) if other not in waiting]
        assert all(at == len(actions) for at, actions in zip(position, self.order, strict=True)), (
            "the order has a cycle"
        )
        return self._ended()

    def _act(self, rank: int, action: Action) -> bool:
        """Run one pass; return whether its input is there."""
        kind, stage, microbatch = action
        move, forward, start = self.moves[kind, stage], kind is Pass.FORWARD, self.free[rank]
        if move.source_stage is not None:
            ready = self.given.get((forward, move.source_stage, microbatch))
            if ready is None:
                return False
            if ready > start:
                self.reductions[rank].idle(start, ready)
                start = ready
            start = self._receive(rank, start, action)
        work = self._find_work(action)
        computed = self._compute(rank, start, action)
        end = start + computed + work.exposed
        self.slices.append(Slice(rank, "compute", kind, stage, microbatch, start, start + computed))
        if work.beside:
            self.slices.append(Slice(rank, "collectives", kind, stage, microbatch, start, start + work.beside))
        if work.exposed:
            if self.pipeline.waits_contend:
                end = self.reductions[rank].beside(start + computed, work.exposed)
            else:
                self.reductions[rank].idle(start + computed, end)
            self.slices.append(Slice(rank, "collectives", kind, stage, microbatch, start + computed, end))
        self.busy[rank] += computed
        self.exposed[rank] += end - start - computed
        if move.activation_bytes:
            self.changes[rank].append((start if move.activation_bytes > 0 else end, move.activation_bytes))
        if move.gradient_bytes:
            self.changes[rank].append((start, move.gradient_bytes))
        if move.workspace_bytes:
            self.changes[rank] += [(start, move.workspace_bytes), (end, -move.workspace_bytes)]
        self.free[rank] = end if move.target_stage is None else self._pass_on(rank, action, end)
        return True

    def _find_work(self, action: Action) -> PassWork:
        """Return the work of a pass: the first one forward through a stage may have more."""
        work, more = self.moves[action.kind, action.stage].work, self.pipeline.stages[action.stage].added_to_first
        is_first = action.kind is Pass.FORWARD and action.microbatch == 0
        return replace(work, exposed=work.exposed + more) if is_first and more else work

    def _receive(self, rank: int, start: float, action: Action) -> float:
        """Take the input of a pass; return when that is done."""
        seconds = self.moves[action.kind, action.stage].receive
        if seconds:
            self.slices.append(Slice(rank, "send", *action, start, start + seconds))
            self.exposed[rank] += seconds
            self.reductions[rank].idle(start, start + seconds)
        return start + seconds

    def _compute(self, rank: int, start: float, action: Action) -> float:
        """Return the seconds of a pass. Buckets on their way slow it down; of the stage's last, each ends a part."""
        seconds, is_last = self.moves[action.kind, action.stage].work.compute, self.last[action.stage] == action
        buckets = self.pipeline.stages[action.stage].buckets if is_last else ()
        reduction, at, part = self.reductions[rank], start, seconds / (len(buckets) or 1)
        for bucket in buckets or (None,):
            at = reduction.beside(at, part) if self.pipeline.overlaps_gradients else at + part
            if bucket is not None and self.pipeline.overlaps_gradients:
                reduction.add(at, bucket)
        return at - start

    def _pass_on(self, rank: int, action: Action, end: float) -> float:
        """Hand the result of a pass to the stage that needs it; return when the rank can continue."""
        kind, stage, microbatch = action
        send = self.moves[kind, stage].send
        start = max(end, self.port_free[rank]) if send else end
        arrival = start + send
        self.given[kind is Pass.FORWARD, stage, microbatch] = start if self.pipeline.holds_receivers else arrival
        if not send:
            return end
        self.port_free[rank] = arrival
        self.slices.append(Slice(rank, "send", kind, stage, microbatch, start, arrival))
        if self.pipeline.overlaps_sends:
            return end
        self.exposed[rank] += arrival - end
        self.reductions[rank].idle(end, arrival)
        return arrival

    def _ended(self) -> Simulation:
        """Wait for gradients, run the optimizers, and add up."""
        ends = []
        if not self.pipeline.overlaps_gradients:
            for stage, last in self.last.items():
                rank = self.pipeline.schedule.holder(last.stage, self.pipeline.ranks)
                for bucket in self.pipeline.stages[stage].buckets:
                    self.reductions[rank].add(self.free[rank], bucket)
        ready = [reduction.finish(free) for reduction, free in zip(self.reductions, self.free, strict=True)]
        closing = self.pipeline.closing or (0.0,) * self.pipeline.ranks
        together = max((at for at, seconds in zip(ready, closing, strict=True) if seconds), default=0.0)
        for rank, optimizer in enumerate(self.pipeline.optimizer):
            reduced = ready[rank]
            self.exposed[rank] += reduced - self.free[rank] + closing[rank]
            if closing[rank]:
                reduced = together + closing[rank]
                self.slices.append(Slice(rank, "collectives", "last collectives", -1, -1, together, reduced))
            self.slices += [
                Slice(rank, "gradients", "bucket", -1, number, *times)
                for number, times in enumerate(self.reductions[rank].done)
            ]
            if self.pipeline.opening:
                self.slices.append(Slice(rank, "collectives", "gather", -1, -1, 0.0, self.pipeline.opening))
            self.slices.append(Slice(rank, "compute", "optimizer", -1, -1, reduced, reduced + optimizer))
            if self.pipeline.update_bytes:
                size = self.pipeline.update_bytes[rank]
                self.changes[rank] += [(reduced, size), (reduced + optimizer, -size)]
            self.busy[rank] += optimizer
            ends.append(reduced + optimizer)
        step = max(ends)
        return Simulation(
            pipeline=self.pipeline,
            step_time_s=step,
            ranks=tuple(
                RankTime(busy=busy, exposed=exposed, idle=max(0.0, step - busy - exposed))
                for busy, exposed in zip(self.busy, self.exposed, strict=True)
            ),
            slices=tuple(self.slices),
            memory=tuple(_accumulate(changes) for changes in self.changes),
        )


def _accumulate(changes: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the bytes held from each time on. What is given back at a time is so before anything is taken."""
    size = 0.0
    timeline: list[tuple[float, float]] = []
    for time, change in sorted(changes):
        size += change
        if timeline and timeline[-1][0] == time:
            timeline[-1] = time, size
        else:
            timeline.append((time, size))
    return tuple(timeline)
