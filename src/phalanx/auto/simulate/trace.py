"""`build_trace`: convert a simulated step to Chrome's Trace Event Format (chrome://tracing, Perfetto).

The form is Google's "Trace Event Format": complete events (X), counters (C) and names (M), in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.auto.simulate.values import SimulatedStep, Slice
from phalanx.cluster.spec.devices import GIB

STREAMS = ("compute", "collectives", "send", "gradients")
NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


def build_trace(simulated: SimulatedStep) -> dict[str, Any]:
    """Return the trace of a step; written as JSON it is a file that Perfetto opens.

    Its processes are the simulated ranks, one for each place along the stage axis. Where all ranks do the same it is
    one, and events have the names of layers. `otherData` says how many ranks do the same, and how many micro-batches of
    the steady state the trace does not show.
    """
    return {
        "traceEvents": [
            *_list_names(simulated),
            *(_event(item, simulated.layers) for item in simulated.simulation.slices),
            *_memory(simulated),
        ],
        "displayTimeUnit": "ms",
        "otherData": simulated.facts(),
    }


def _list_names(simulated: SimulatedStep) -> Iterator[dict[str, Any]]:
    pipeline = simulated.simulation.pipeline
    for rank, stages in enumerate(pipeline.stages_by_rank):
        name = "each rank" if simulated.layers else f"stage {', '.join(map(str, stages))}"
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for line, stream in enumerate(STREAMS):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": line, "args": {"name": stream}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": line, "args": {"sort_index": line}}


def _event(item: Slice, layers: tuple[str, ...]) -> dict[str, Any]:
    number = f" {item.microbatch}" if item.microbatch >= 0 else ""
    if layers and item.stage >= 0:
        number = f" {layers[item.stage]}"
    arguments = {"stage": item.stage, "microbatch": item.microbatch} if item.stage >= 0 else {}
    return {
        "ph": "X",
        "name": NAMES.get(item.kind, item.kind) + number,
        "cat": item.stream,
        "pid": item.rank,
        "tid": STREAMS.index(item.stream),
        "ts": item.start * 1e6,
        "dur": (item.end - item.start) * 1e6,
        "args": arguments,
    }


def _memory(simulated: SimulatedStep) -> Iterator[dict[str, Any]]:
    for rank, timeline in enumerate(simulated.simulation.memory):
        for time, size in timeline:
            yield {"ph": "C", "name": "memory", "pid": rank, "ts": time * 1e6, "args": {"GiB": round(size / GIB, 4)}}
