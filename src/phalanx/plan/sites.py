"""`Site`: the operators of a model that a Plan places (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

from phalanx.errors import PlanError
from phalanx.plan.value import Plan


class Site(NamedTuple):
    """An operator of the forward pass of a model."""

    module: str
    """Path of the module whose own code runs it."""

    number: int
    """How many that code ran before it in the same call of the module."""

    operator: str
    """torch's name, such as `aten._softmax.default`."""

    def __str__(self) -> str:
        return f"{self.module}:{self.number}:{self.operator}"

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the site that a Plan names.

        Raises:
            PlanError: If it is none.
        """
        module, _, rest = text.partition(":")
        number, _, operator = rest.partition(":")
        if not number.isdecimal() or not operator:
            raise PlanError(
                f"ops[{text}] names no operator. Write the module, the operator's number in it and its name, such as "
                "'blocks.0.attend:3:aten._softmax.default'; phalanx.auto.capture.operator_sites.sites(captured) lists "
                "those of a step that phalanx.auto.capture.step.capture captured."
            )
        return cls(module, int(number), operator)

    def is_inside(self, module: str) -> bool:
        """Return whether the module, or one inside it, runs this operator."""
        return not module or f"{self.module}.".startswith(f"{module}.")


def regions(plan: Plan) -> tuple[str, ...]:
    """Return the outermost of the modules whose operators a Plan places."""
    return outermost(Site.read(rule.site).module for rule in plan.ops)


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the modules of these that are in no other of them, by the length of their paths."""
    outer: list[str] = []
    for path in sorted(dict.fromkeys(paths), key=len):
        if not any(not around or path.startswith(f"{around}.") for around in outer):
            outer.append(path)
    return tuple(outer)


def axis_of(plan: Plan) -> str | None:
    """Return the mesh axis over whose ranks a Plan's operators are placed; None if it places none.

    Raises:
        PlanError: If there are several, or ranks along it read other rows.
    """
    named = {axis for rule in plan.ops for layout in rule.outputs for axis in layout}
    if not named:
        return None
    rows = named & set(plan.step.batch_axes)
    if len(named) > 1 or rows:
        why = f"ranks along {min(rows)!r} read other rows" if rows else f"these are {len(named)}"
        raise PlanError(
            f"the Plan places operators along {', '.join(map(repr, sorted(named)))}: {why}. Place them along one axis "
            "whose ranks read the same rows, such as 'model'."
        )
    (axis,) = named
    return axis
