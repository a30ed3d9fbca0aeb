"""`Tolerance`: how far two runs may differ by rounding alone, from their precision and from a third run.

Within one step, sums of float32 numbers in another order differ by a small multiple of its precision. Over steps such a
difference grows as fast as the training lets it. That is measured: a control run begins with the last bit of its
weights changed, and what becomes of that by a step is what rounding explains there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from phalanx.diagnose.verify.records import RankStep, Rows, Step
from phalanx.parallel.observe.sketch import BUCKETS, SQUARES, Sketch, distance, norm

_OF_CONTROL = 16.0
"""Multiple of what became of a changed last bit: an order of summation changes a few, in every layer."""

_FLOAT32 = float(np.finfo(np.float32).eps)


def base_tolerance(step: Step) -> float:
    """Return the relative difference that rounding makes within one step, of the lowest precision in it."""
    eps = max((rank.meta["precision"] for rank in step), default=0.0) or _FLOAT32
    return float(min(64 * eps, max(8 * eps, 1e-3)))


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding explains at one step."""

    base: float
    measured: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By kind and name, how far the control run has been from the reference at most."""

    def of_tensor(self, what: str, name: str) -> float:
        """Return the tolerance of a tensor of `grads` or `weights`, of a row of `outputs`, or of the `loss`."""
        return max(self.base, _OF_CONTROL * self.measured.get((what, name), 0.0))

    def of_tensors(self, what: str) -> float:
        """Return the largest tolerance of any of them."""
        return max((self.of_tensor(*key) for key in self.measured if key[0] == what), default=self.base)


def measure_control(
    reference: RankStep, control: RankStep, before: Mapping[tuple[str, str], float]
) -> dict[tuple[str, str], float]:
    """Return how far a control run is from its reference at a step, or was at a step before if that is more."""
    measured = dict(before)

    def note(what: str, name: str, value: float) -> None:
        measured[what, name] = max(measured.get((what, name), 0.0), value)

    for what in ("grads", "weights"):
        first, second = reference.sketches(what), control.sketches(what)
        for name in first.keys() & second.keys():
            note(what, name, relative(first[name], second[name], floor(first, reference, what, name)))
    levels = OutputLevels(reference)
    for name, rows in reference.outputs.items():
        least, others = levels.least(name, rows), control.outputs.get(name)
        if others is not None and rows.shape == others.shape:
            note("outputs", name, row_difference(rows, others, least))
    loss, other_loss = (float(np.mean(rank.meta["losses"] or [0.0])) for rank in (reference, control))
    note("loss", "", abs(loss - other_loss) / max(abs(loss), abs(other_loss), 1e-300))
    return measured


class OutputLevels:
    """How large numbers are in the forward pass so far: rounding errors of small results are those of large inputs."""

    def __init__(self, step: RankStep) -> None:
        self._sizes, self._level = step.row_sizes, 0.0

    def least(self, name: str, rows: Rows) -> float:
        """Take in an output, in forward order; return the sum of magnitudes against which its rows are measured."""
        size = self._sizes.get(name, 1)
        mean = float(rows[:, 1].mean()) / max(size, 1) if len(rows) else 0.0
        self._level = max(self._level, mean if np.isfinite(mean) else 0.0)
        return self._level * size


def relative(first: Sketch, second: Sketch, least: float) -> float:
    """Return the distance of two tensors in parts of the larger one, or of `least` if that is larger."""
    if first[-1] or second[-1]:  # entries that are not finite
        return 0.0 if first[-1] == second[-1] else float("inf")
    apart = distance(first, second)
    return apart / max(norm(first), norm(second), least) if apart else 0.0


def floor(sketches: Mapping[str, Sketch], step: RankStep, what: str, name: str) -> float:
    """Return the norm that a tensor of this size would have if its entries were as large as those of all tensors.

    A gradient that is zero but for rounding, as that of a bias before batch normalisation, is measured against it.
    """
    sizes = {key: float(np.prod(facts["shape"])) for key, facts in step.facts(what).items()}
    total = sum(sizes.values())
    squares = sum(float(values[SQUARES]) for values in sketches.values())
    return float(np.sqrt(squares * sizes.get(name, 0.0) / total)) if total else 0.0


def row_difference(first: Rows, second: Rows, least: float = 0.0) -> float:
    """Return the largest difference of two outputs' rows, in parts of the sum of magnitudes or of `least` if larger."""
    if not len(first):
        return 0.0
    scale = np.maximum(np.maximum(first[:, 1], second[:, 1]), max(least, 1e-300))
    with np.errstate(invalid="ignore"):
        gaps = np.abs(first - second).max(1) / scale
    both = ~np.isfinite(first).all(1) & ~np.isfinite(second).all(1)
    return float(np.where(both, 0.0, np.nan_to_num(gaps, nan=np.inf)).max())


def linear(values: Sketch) -> Sketch:
    """Return the linear part of a sketch, its buckets alone."""
    return values[:BUCKETS]
