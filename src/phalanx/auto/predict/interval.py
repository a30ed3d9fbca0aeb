"""`estimate_interval`: between which times a step lies, by what its constants and its description leave open (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.auto.cost.constants import Constants
from phalanx.auto.cost.priors import PRIORS, move
from phalanx.auto.predict.run_spec import RunSpec, find_shape_conflict
from phalanx.auto.predict.stack import StackName
from phalanx.auto.predict.step_seconds import StepSeconds

COVERAGE = 0.8
"""Share of runs whose time lies within the interval."""

_HALF_WIDTH = 1.2816
"""Standard deviations on either side that hold `COVERAGE` of a normal distribution."""

UNEXPLAINED = 0.08
"""Standard deviation of the logarithm of times by what is in no constant: versions of software, machines, stragglers.
It is what makes the intervals of sources that are left out cover (benchmarks/bench_predict.py)."""

_RECOMPUTE = ("none", "selective", "full")
_STACKS: tuple[StackName, ...] = ("megatron-2022", "megatron-core", "pytorch")


def estimate_interval(run: RunSpec, constants: Constants) -> tuple[float, float]:
    """Return the seconds that a step takes at least and at most, in `COVERAGE` of runs.

    Each constant is moved by the spread that is known of it (`PRIORS`), and each field that the run leaves open by its
    other values; the changes add up as squares.
    """
    centre = _seconds(run, constants)
    both = UNEXPLAINED**2 + sum(change**2 for change in _changes_by_constants(run, constants, centre))
    below, above = both, both
    for field in _open_fields(run):
        changes = [math.log(_seconds(other, constants) / centre) for other in _alternatives(run, field)]
        # A value that may lie anywhere up to the furthest has a third of the square of that.
        below, above = below + min([0.0, *changes]) ** 2 / 3, above + max([0.0, *changes]) ** 2 / 3
    return centre * math.exp(-_HALF_WIDTH * math.sqrt(below)), centre * math.exp(_HALF_WIDTH * math.sqrt(above))


def _seconds(run: RunSpec, constants: Constants) -> float:
    return sum(StepSeconds(run, constants).breakdown().values())


def _changes_by_constants(run: RunSpec, constants: Constants, centre: float) -> Iterator[float]:
    """Yield the change of a step's logarithm by one standard deviation of each constant."""
    device = run.device
    if device.measured is not None:
        return
    for name, prior in PRIORS.items():
        moved, other = move(name, math.exp(prior.spread), device, constants)
        if moved is not device or other is not constants:
            yield math.log(_seconds(_on_device(run, moved), other) / centre)


def _on_device(run: RunSpec, device: object) -> RunSpec:
    return run.model_copy(update={"cluster": run.cluster.model_copy(update={"figures": device})})


def _open_fields(run: RunSpec) -> tuple[str, ...]:
    """Return the fields that a run does not state: those that it marks as assumed, kernels and overlap left out."""
    fields = dict.fromkeys(run.assumed)
    if run.stack_name is None:
        fields["software"] = None
    if "overlap" not in run.model_fields_set:
        fields["overlap"] = None
    return tuple(fields)


def _alternatives(run: RunSpec, field: str) -> Iterator[RunSpec]:
    """Yield the run with other values of a field that it leaves open; none where the field hardly changes a step."""
    part, _, name = field.partition(".")
    if field == "software":
        yield from (run.model_copy(update={"stack": stack}) for stack in _STACKS)
    elif field == "recompute":
        yield from (run.model_copy(update={"recompute": how}) for how in _RECOMPUTE)
    elif part == "overlap":
        yield from _with(run, "overlap", [{kind: not getattr(run.overlap, kind)} for kind in ("dp", "tp", "pp")])
    elif field == "cluster.node_gbps":
        yield from _with(run, "cluster", [{name: run.cluster.node_gbps * ratio} for ratio in (0.5, 2.0)])
    elif field == "batch.micro":
        yield from _with(run, "batch", [{name: size} for size in (run.batch.micro // 2, 2 * run.batch.micro) if size])
    elif field in ("parallel.sequence_parallel", "parallel.zero", "parallel.vpp"):
        others = {"sequence_parallel": (True, False), "zero": (0, 1), "vpp": (1, 2)}[name]
        for other in _with(run, "parallel", [{name: value} for value in others]):
            if find_shape_conflict(other.model, other.parallel) is None:
                yield other


def _with(run: RunSpec, part: str, changes: list[dict[str, object]]) -> Iterator[RunSpec]:
    yield from (run.model_copy(update={part: getattr(run, part).model_copy(update=change)}) for change in changes)
