"""`Origin`: the first tensor of a step that is not finite, and the sentence that names it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

_SHOWN = 4
WHOLE_MODEL = "the model"
"""What the outermost module is called, which has no name of its own."""


class Stage(IntEnum):
    """Where in a step a number is not finite, earliest first."""

    WEIGHT = 0
    INPUT = 1
    OUTPUT = 2
    LOSS = 3
    GRADIENT = 4
    UNKNOWN = 5
    """Somewhere in a step that could not be computed again."""

    REDUCED = 6
    """Only in gradients as they arrived: of what the loss takes beside the model, or a sum that is too large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What one rank found."""

    stage: Stage
    what: str
    """NaN or infinity."""

    tensor: str
    """A parameter, an input or what came out of a module."""

    module: str = ""
    operator: str = ""
    line: str = ""
    """File and line of the script where it was computed."""

    rows: tuple[int, ...] = ()
    """Rows of this rank's batch that it is in; empty when in all, or when not known."""

    samples: tuple[int, ...] = ()
    """The same rows by their dataset indices."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Origin:
        """Return what `to_json` described."""
        lists = {name: tuple(values[name]) for name in ("rows", "samples")}
        return cls(**{**values, **lists, "stage": Stage(values["stage"])})

    def describe(self, rank: int, step: int, world: int) -> str:
        """Return the sentence that names it."""
        module = self.module if self.module.startswith(WHOLE_MODEL) else f"module {self.module}"
        where = f" of {module}" if self.module else ""
        how = f", computed by {self.operator}" if self.operator else ""
        line = f" at {self.line}" if self.line else ""
        on = f" on rank {rank}" if world > 1 else ""
        return (
            f"step {step}: {self.what} first appeared{on} in {self.tensor}{where}{how}{line}{self._of_samples()}. "
            f"{_ADVICE[self.stage]}"
        )

    def _of_samples(self) -> str:
        if not self.rows:
            return ""
        rows = _list_numbers(self.rows)
        plural = "s" if len(self.rows) > 1 else ""
        if self.samples:
            return (
                f", for sample{plural} {_list_numbers(self.samples)} of the dataset (row{plural} {rows} of the batch)"
            )
        return f", for row{plural} {rows} of the batch"


UNKNOWN = Origin(stage=Stage.UNKNOWN, what="NaN or infinity", tensor="a gradient")
"""What a rank says that knows no more."""

_ADVICE = {
    Stage.WEIGHT: "The update before made it: lower the learning rate, clip gradients, or look at weight decay.",
    Stage.INPUT: "Repair or leave out this data.",
    Stage.OUTPUT: "Keep what goes into the operator within its range (clamp, eps), or compute it in float32.",
    Stage.LOSS: "The model's output is finite: look at targets, weights and logarithms in the loss.",
    Stage.GRADIENT: "The forward pass is finite: look for functions without a derivative there (sqrt, norm, pow at 0).",
    Stage.UNKNOWN: "The step could not be computed again, so the module is not known: try unsharded and uncompiled.",
    Stage.REDUCED: "What each rank's model computes is finite: look at penalties on weights, and at sums too large for "
    "the type in which gradients travel.",
}


def bad_rows(tensor: Tensor, rows: int) -> tuple[int, ...]:
    """Return the rows of a tensor that are not finite; empty if all are, or it has another number of rows."""
    if not tensor.dim() or len(tensor) != rows:
        return ()
    bad = (~torch.isfinite(tensor.detach().reshape(rows, -1))).any(1).nonzero().flatten().tolist()
    return () if len(bad) == rows else tuple(bad)


def kind_of(tensor: Tensor) -> str:
    """Return what is not finite in a tensor, in words."""
    return "NaN" if bool(torch.isnan(tensor).any()) else "infinity"


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor, of any dtype, holds finite numbers only."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return True
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return bool(torch.isfinite(values).all())


def _list_numbers(numbers: tuple[int, ...]) -> str:
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return ", ".join(map(str, numbers[:_SHOWN])) + more
