"""`RunVerdict`: the result of a comparison: equal, or the first difference with its likely cause."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class DifferenceCause(StrEnum):
    """Why two runs differ."""

    SEED = "seed"
    GLOBAL_BATCH = "global batch"
    NOT_SHARDED = "data not sharded"
    DATA_ORDER = "order of data"
    OTHER_DATA = "other data"
    BATCH_NORM = "batch-norm statistics"
    RANDOM = "random numbers"
    FORWARD = "forward pass"
    LOSS = "loss"
    NO_SYNC = "no_sync left on"
    MISSING_ALL_REDUCE = "missing all-reduce"
    CORRUPT_GRADIENT = "corrupt gradient"
    FROZEN = "parameter frozen on some ranks"
    PARTLY_USED = "parameter used on some ranks only"
    UNEVEN_BATCH = "uneven batch"
    GRADIENT_SCALE = "gradient scale"
    REDUCTION = "reduction of gradients"
    BACKWARD = "backward pass"
    SETTINGS = "optimizer settings"
    UPDATE = "update"
    NOT_FINITE = "not finite"
    LENGTH = "number of steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """The first difference of two runs."""

    step: int
    """Optimizer step, from 0."""

    kind: str
    """initial weight, samples, output, loss, gradient, weight or buffer."""

    tensor: str
    """Its name; empty for samples and losses."""

    amount: float
    """The difference in parts of the larger one's norm."""

    cause: DifferenceCause
    ranks: tuple[int, ...] = ()
    """The ranks at fault, where they are known."""

    explanation: str
    """What was seen, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunVerdict:
    """Whether two runs are equal."""

    runs: tuple[str, str]
    steps: int
    """Optimizer steps that were compared."""

    is_exact: bool
    """Whether bits had to agree, as with logical replicas."""

    tolerance: float
    """Largest relative difference that rounding may make of a gradient, at the last step that was compared."""

    largest: float
    """Largest relative difference of a gradient."""

    same_bits: bool
    """Whether all gradients and weights had the same bits."""

    difference: FirstDifference | None = None
    note: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether no difference was found."""
        return self.difference is None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"equal": self.is_equal, **asdict(self)}

    def text(self) -> str:
        """Return the verdict as lines for a terminal."""
        first, second = self.runs
        if self.difference is None:
            bits = "the same bits" if self.same_bits else f"gradients differ by at most {self.largest:.1e}"
            limit = "" if self.same_bits else f" (rounding explains {self.tolerance:.1e})"
            return f"EQUAL: {first} and {second} in {self.steps} steps: {bits}{limit}.{self._note()}"
        difference = self.difference
        name = f" of {difference.tensor}" if difference.tensor else ""
        ranks = f" (rank {', '.join(map(str, difference.ranks))})" if difference.ranks else ""
        size = "" if math.isnan(difference.amount) else f", by {difference.amount:.2g} of its size"
        return (
            f"DIFFERENT: {first} and {second} differ first in step {difference.step}: the {difference.kind}{name}"
            f"{ranks}{size}.\nLikely cause: {difference.cause}. {difference.explanation}{self._note()}"
        )

    def _note(self) -> str:
        return f"\n{self.note}" if self.note else ""
