"""A simulated step in the form that chrome://tracing and ui.perfetto.dev read: one process a rank, one line a stream.

The form is Google's "Trace Event Format": complete events (X), counters (C) and names (M), in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.auto.simulate_run import SimulatedRun
from phalanx.auto.simulate_values import Slice
from phalanx.cluster.devices import GIB

STREAMS = ("compute", "collectives", "send", "gradients")
NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


def trace_of(simulated: SimulatedRun) -> dict[str, Any]:
    """Return the trace of a step; written as JSON it is a file that Perfetto opens.

    Its processes are the simulated ranks, one for each place along the stage axis; `otherData` says how many ranks do
    the same, and how many micro-batches of the steady state the trace does not show.
    """
    simulation = simulated.simulation
    return {
        "traceEvents": [*_named(simulated), *map(_event, simulation.slices), *_memory(simulated)],
        "displayTimeUnit": "ms",
        "otherData": {
            "run": simulated.run.name,
            "step_time_s": simulation.step_time_s,
            "tokens_per_s": simulated.tokens_per_s,
            "usd_per_step": simulated.usd_per_step,
            "ranks_that_do_the_same": simulation.pipeline.copies,
            "microbatches_left_out": simulation.left_out,
        },
    }


def _named(simulated: SimulatedRun) -> Iterator[dict[str, Any]]:
    pipeline = simulated.simulation.pipeline
    for rank in range(pipeline.ranks):
        stages = ", ".join(
            str(s) for s in range(len(pipeline.stages)) if pipeline.schedule.holder(s, pipeline.ranks) == rank
        )
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"stage {stages}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for line, stream in enumerate(STREAMS):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": line, "args": {"name": stream}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": line, "args": {"sort_index": line}}


def _event(one: Slice) -> dict[str, Any]:
    number = f" {one.microbatch}" if one.microbatch >= 0 else ""
    told = {"stage": one.stage, "microbatch": one.microbatch} if one.stage >= 0 else {}
    return {
        "ph": "X",
        "name": NAMES.get(one.kind, one.kind) + number,
        "cat": one.stream,
        "pid": one.rank,
        "tid": STREAMS.index(one.stream),
        "ts": one.start * 1e6,
        "dur": (one.end - one.start) * 1e6,
        "args": told,
    }


def _memory(simulated: SimulatedRun) -> Iterator[dict[str, Any]]:
    for rank, timeline in enumerate(simulated.simulation.memory):
        for time, held in timeline:
            yield {"ph": "C", "name": "memory", "pid": rank, "ts": time * 1e6, "args": {"GiB": round(held / GIB, 4)}}
