"""`estimate_interval`: between which times a step lies, by what its constants and its description leave open (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from phalanx.auto.cost.constants import Constants
from phalanx.auto.cost.priors import PRIORS, UNSEEN_SPREAD, kind_of, move
from phalanx.auto.predict.run_parts import find_shape_conflict
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.predict.schedule_conflict import find_schedule_conflict
from phalanx.auto.predict.stack import StackName
from phalanx.auto.predict.step_seconds import StepSeconds

COVERAGE = 0.8
"""Share of runs whose time lies within the interval."""

_HALF_WIDTH = 1.2816
"""Standard deviations on either side that hold `COVERAGE` of a normal distribution."""

UNEXPLAINED = 0.08
"""Standard deviation of the logarithm of times by what is in no constant: versions of software, machines, stragglers.
0.04 is enough for sources left out of the fit; they were in view when the model was written (docs/predict.md)."""

_MOST_PASSES = 4000
"""Passes of a pipeline that are computed in their order for each change; a longer one changes as a formula does."""

_OVERLAPS = ("dp", "tp", "pp")
_STACKS: tuple[StackName, ...] = ("megatron-2022", "megatron-core", "pytorch")


def estimate_interval(run: RunSpec, constants: Constants) -> tuple[float, float]:
    """Return the seconds that a step takes at least and at most, in `COVERAGE` of runs.

    Each constant is moved by the spread that is known of it (`PRIORS`), and each field that the run leaves open by its
    other values; the changes add up as squares.
    """
    centre, step = _seconds(run, constants), sum(StepSeconds(run, constants).breakdown().values())
    both = UNEXPLAINED**2 + sum(change**2 for change in _changes_by_constants(run, constants, centre))
    below, above = both, both
    for field in _open_fields(run):
        changes = [math.log(_seconds(other, constants) / centre) for other in _alternatives(run, field)]
        # A value that may lie anywhere up to the furthest has a third of the square of that.
        below, above = below + min([0.0, *changes]) ** 2 / 3, above + max([0.0, *changes]) ** 2 / 3
    return step * math.exp(-_HALF_WIDTH * math.sqrt(below)), step * math.exp(_HALF_WIDTH * math.sqrt(above))


def _seconds(run: RunSpec, constants: Constants) -> float:
    return sum(StepSeconds(run, constants).breakdown(_MOST_PASSES).values())


def _changes_by_constants(run: RunSpec, constants: Constants, centre: float) -> Iterator[float]:
    """Yield the change of a step's logarithm by one standard deviation of each constant."""
    device = run.device
    if device.measured is not None:
        return
    for name, prior in PRIORS.items():
        moved, other = move(name, math.exp(prior.spread), device, constants)
        if moved is not device or other is not constants:
            yield math.log(_seconds(_on_device(run, moved), other) / centre)
    if kind_of(device) not in PRIORS:
        more = math.exp(UNSEEN_SPREAD)
        moved = replace(device, sustained=device.sustained * more, sustained_fp8=device.sustained_fp8 * more)
        yield math.log(_seconds(_on_device(run, moved), constants) / centre)


def _on_device(run: RunSpec, device: object) -> RunSpec:
    return run.model_copy(update={"cluster": run.cluster.model_copy(update={"figures": device})})


def _open_fields(run: RunSpec) -> tuple[str, ...]:
    """Return the fields that a run does not state: those that it marks as assumed, kernels and overlap left out."""
    fields = set(run.assumed)
    if run.stack_name is None or "software" in fields:
        fields.add("stack")
    if "overlap" not in run.model_fields_set or "overlap" in fields:
        fields |= {f"overlap.{kind}" for kind in _OVERLAPS}
    return tuple(sorted(fields))


def _alternatives(run: RunSpec, field: str) -> Iterator[RunSpec]:
    """Yield the run with other values of a field that it leaves open; none where the field hardly changes a step."""
    part, _, name = field.partition(".")
    gbps, micro = run.cluster.node_gbps, run.batch.micro
    values: Mapping[str, Sequence[object]] = {
        "stack": _STACKS,
        "recompute": ("none", "selective", "full"),
        "compile": (not run.compile,),
        "model.flash": (not run.model.flash,),
        "model.expert_load": (1.0, 2 * run.model.expert_load) if run.model.experts else (),
        "cluster.node_gbps": (gbps / 2, gbps * 2),
        "batch.micro": (max(1, micro // 2), 2 * micro),
        "parallel.sequence_parallel": (True, False),
        "parallel.zero": (0, 1),
        "parallel.vpp": () if run.schedule == "gpipe" else (1, 2),
        **{f"overlap.{kind}": (not getattr(run.overlap, kind),) for kind in _OVERLAPS},
    }
    for value in values.get(field, ()):
        changed = getattr(run, part).model_copy(update={name: value}) if name else value
        other = run.model_copy(update={part: changed})
        if find_shape_conflict(other.model, other.parallel) is None and find_schedule_conflict(other) is None:
            yield other
