"""`compare_runs`: compare two recorded runs step by step, up to the first difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from phalanx.diagnose.verify import between_ranks, between_runs
from phalanx.diagnose.verify.data_checks import check_data
from phalanx.diagnose.verify.records import RecordedRun, Step, readers_of
from phalanx.diagnose.verify.tolerance import Tolerance, base_tolerance, floor, measure_control, relative
from phalanx.diagnose.verify.verdict import DifferenceCause, FirstDifference, RunVerdict
from phalanx.errors import ConfigError

_MAY_BE_KINKS = (DifferenceCause.BACKWARD, DifferenceCause.REDUCTION)
_OF_KINK = 0.01
"""Largest relative difference of a gradient that a single number on the other side of a kink may cause."""

_CHAOS = 0.05
"""Relative difference by rounding alone beyond which a comparison says nothing."""


def compare_runs(first: RecordedRun, second: RecordedRun, control: RecordedRun | None = None) -> RunVerdict:
    """Compare two runs.

    Args:
        first: The reference, usually of one rank.
        second: The run in question.
        control: The reference again, begun with the last bit of its weights changed.

    Raises:
        ConfigError: If a run made no step.
    """
    for run in (first, second):
        if not run.steps:
            raise ConfigError(
                f"the run with {run.label} made no optimizer step that can be seen, so there is nothing to compare. "
                "Give a script that trains with a torch optimizer, whose step is not compiled."
            )
    is_exact = first.replicas is not None and first.replicas == second.replicas
    comparison = _Comparison(first, second, None if is_exact else control, is_exact)
    if control is not None and (difference := _of_chance(first, control)) is not None:
        return comparison.verdict(1, difference)
    for number in range(min(len(first.steps), len(second.steps))):
        if not comparison.can_tell(number):
            return comparison.verdict(number, None)
        difference = comparison.difference_at(number)
        if difference is not None:
            return comparison.verdict(number + 1, difference)
    return comparison.verdict(min(len(first.steps), len(second.steps)), _of_length(first, second))


class _Comparison:
    """A comparison of two runs that continues step by step."""

    def __init__(self, first: RecordedRun, second: RecordedRun, control: RecordedRun | None, is_exact: bool) -> None:
        self._first, self._second, self._control, self._is_exact = first, second, control, is_exact
        self._tolerance = Tolerance(0.0)
        self._largest, self._same_bits = 0.0, True
        self._notes: list[str] = []

    def can_tell(self, number: int) -> bool:
        """Return whether rounding alone is still small at a step."""
        self._tolerance = self._tolerance_at(number)
        if not number or self._tolerance.of_tensors("grads") <= _CHAOS:
            return True
        self._notes.append(
            f"From step {number} on, rounding alone changes gradients by more than {_CHAOS:.0%}, so later steps were "
            "not compared. --replicas N compares bits instead."
        )
        return False

    def _tolerance_at(self, number: int) -> Tolerance:
        if self._is_exact:
            return Tolerance(0.0)
        base = base_tolerance(self._first.steps[number]) * (number + 1)  # each step adds its own
        measured = self._tolerance.measured
        if self._control is not None and number < len(self._control.steps):
            steps = self._first.steps[number][0], self._control.steps[number][0]
            measured = measure_control(*steps, measured)
        return Tolerance(base, measured)

    def difference_at(self, number: int) -> FirstDifference | None:
        """Return the first difference of a step."""
        for difference in _differences(self._first, self._second, number, self._tolerance, is_exact=self._is_exact):
            if not self._is_kink(difference):
                return difference
            self._notes.append(
                f"In step {number} alone the gradient of {difference.tensor} differed by {difference.amount:.1e}, as "
                "where one number of a ReLU or a maximum falls on the other side."
            )
        reference, candidate = self._first.steps[number], self._second.steps[number]
        self._largest = max(self._largest, _largest(reference, candidate))
        self._same_bits = self._same_bits and _has_same_bits(reference, candidate)
        return None

    def _is_kink(self, difference: FirstDifference) -> bool:
        """Return whether a small difference of a gradient is gone in the next step."""
        following = difference.step + 1
        if self._is_exact or difference.cause not in _MAY_BE_KINKS or difference.amount > _OF_KINK:
            return False
        if following >= min(len(self._first.steps), len(self._second.steps)):
            return following > 1
        steps = self._first.steps[following], self._second.steps[following]
        return between_runs.check_gradients(*steps, following, self._tolerance) is None

    def verdict(self, steps: int, difference: FirstDifference | None) -> RunVerdict:
        """Return the result after so many steps."""
        return RunVerdict(
            runs=(self._first.label, self._second.label),
            steps=steps,
            is_exact=self._is_exact,
            tolerance=self._tolerance.of_tensors("grads"),
            largest=self._largest,
            same_bits=self._same_bits and difference is None,
            difference=difference,
            note="\n".join(self._notes),
        )


def _of_chance(first: RecordedRun, control: RecordedRun) -> FirstDifference | None:
    """Return a difference of the first step of two runs of one kind: such a script computes by chance."""
    reference, candidate = first.steps[0], control.steps[0]
    base = Tolerance(64 * base_tolerance(reference))
    return (
        between_runs.check_initial(reference, candidate, 0)
        or check_data(_readers(first), _readers(control), 0)
        or between_runs.check_outputs(readers_of(reference), readers_of(candidate), 0, base)
    )


def _differences(
    first: RecordedRun, second: RecordedRun, number: int, tolerance: Tolerance, *, is_exact: bool
) -> Iterator[FirstDifference]:
    """Yield what differs at a step, in the order in which a step computes."""
    reference, candidate = first.steps[number], second.steps[number]
    if is_exact and _has_same_bits(reference, candidate) and _agree(reference) and _agree(candidate):
        return
    # Sums of rows were added up in float64 in another order than the bits of a replica.
    of_outputs = Tolerance(1e-12) if is_exact else tolerance
    of_loss = Tolerance(1e-6) if is_exact else tolerance
    before = second.steps[number - 1] if number else candidate
    checks: tuple[Callable[[], FirstDifference | None], ...] = (
        lambda: between_ranks.check_initial(reference, number),
        lambda: between_ranks.check_initial(candidate, number),
        lambda: between_runs.check_initial(reference, candidate, number),
        lambda: between_ranks.check_between_steps(before, candidate, number),
        lambda: between_ranks.check_shards(readers_of(candidate), number),
        lambda: check_data(_readers(first), _readers(second), number),
        lambda: between_ranks.check_trainable(candidate, number),
        lambda: between_runs.check_outputs(readers_of(reference), readers_of(candidate), number, of_outputs),
        lambda: between_runs.check_loss(readers_of(reference), readers_of(candidate), number, of_loss),
        lambda: between_ranks.check_gradients(reference, number),
        lambda: between_ranks.check_gradients(candidate, number),
        lambda: between_runs.check_gradients(reference, candidate, number, tolerance),
        lambda: between_ranks.check_weights(reference, number),
        lambda: between_ranks.check_weights(candidate, number),
        lambda: between_runs.check_weights(reference, candidate, number, tolerance),
    )
    yield from (difference for check in checks if (difference := check()) is not None)


def _readers(run: RecordedRun) -> list[Step]:
    return [readers_of(step) for step in run.steps]


def _agree(step: Step) -> bool:
    return between_ranks.check_gradients(step, 0) is None and between_ranks.check_weights(step, 0) is None


def _has_same_bits(first: Step, second: Step) -> bool:
    return all(
        {name: facts["digest"] for name, facts in first[0].facts(what).items()}
        == {name: facts["digest"] for name, facts in second[0].facts(what).items()}
        for what in ("grads", "weights")
    )


def _largest(first: Step, second: Step) -> float:
    reference, candidate = first[0].sketches("grads"), second[0].sketches("grads")
    gaps = [
        relative(reference[name], candidate[name], floor(reference, first[0], "grads", name))
        for name in reference
        if name in candidate and first[0].facts("grads")[name]["shape"] == second[0].facts("grads")[name]["shape"]
    ]
    return max(gaps, default=0.0)


def _of_length(first: RecordedRun, second: RecordedRun) -> FirstDifference | None:
    lengths = len(first.steps), len(second.steps)
    if lengths[0] == lengths[1]:
        return None
    return FirstDifference(
        step=min(lengths),
        kind="loss",
        tensor="",
        amount=1.0,
        cause=DifferenceCause.LENGTH,
        explanation=f"The one run made {lengths[0]} steps and the other {lengths[1]}.",
    )
