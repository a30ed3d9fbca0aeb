"""Operators of a captured step that a Plan may place on ranks, and whether DTensor's rules allow it (no devices).

`parallel/operators/placement` runs them. Here a region is followed on shapes, operator by operator, as it will run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from phalanx.auto.capture.graph import Argument, Captured, Operator, Read, TensorShape, with_reads
from phalanx.errors import did_you_mean
from phalanx.plan.sites import Site, axis_of, regions
from phalanx.plan.value import Plan, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

_MOST_SHOWN = 3

_TRIED_DIMS = 2
"""Dims along which inputs are cut: rows, and what follows them."""


def sites(captured: Captured) -> dict[str, Operator]:
    """Return the operators of the forward pass by the words that a Plan names them with, in the order they run.

    A module that is called several times runs the same ones each time; they are named once.
    """
    return {str(site): captured.operators[place] for place, site in _numbered(captured)}


def unfit(captured: Captured, plan: Plan) -> str | None:
    """Return why a Plan's rules for operators do not fit a captured step; None if they do."""
    if plan.capture_digest != captured.digest():
        return (
            f"they are of the step captured as {plan.capture_digest}, and this model's is {captured.digest()}: code or "
            "batch differ. Train with the global batch that was planned for, or make a new Plan for this step"
        )
    known = sites(captured)
    for rule in plan.ops:
        operator, count = known.get(rule.site), len(rule.outputs)
        if operator is None:
            few = [name for name in known if name.startswith(f"{rule.site.partition(':')[0]}:")][:_MOST_SHOWN]
            hint = did_you_mean(rule.site, known) or f" Found there: {', '.join(few) or 'none'}."
            return f"the captured step has no operator {rule.site!r}.{hint} Correct the Plan"
        if len(operator.outputs) != count:
            return f"ops[{rule.site}] has {count} outputs, the operator {len(operator.outputs)}. Say one of each"
        for layout, output in zip(rule.outputs, operator.outputs, strict=True):
            for placed in layout.values():
                if not _fits(placed, output):
                    return f"ops[{rule.site}] lays out {list(output.shape)} as {placed}. Replicate it, or cut a dim"
    return _unlawful(captured, plan)


def _fits(placed: object, output: TensorShape) -> bool:
    if isinstance(placed, Shard):
        return placed.sizes is None and -len(output.shape) <= placed.dim < len(output.shape)
    return getattr(placed, "kind", None) == "replicate"


def _unlawful(captured: Captured, plan: Plan) -> str | None:
    """Return which operator of a region torch has no rule for; None if all can run."""
    axis = axis_of(plan)
    if axis is None:
        return None
    ranks = plan.axis_size(axis)
    rules = {rule.site: [layout.get(axis) for layout in rule.outputs] for rule in plan.ops}
    for path in regions(plan):
        run = _Followed(ranks)
        for place, site in _numbered(captured):
            if not site.is_inside(path):
                continue
            operator = captured.operators[place]
            wanted = [run.placement(one.dim if isinstance(one, Shard) else None) for one in rules.get(str(site), ())]
            if _draws(operator):
                return f"{str(site)!r} draws random numbers, of which parts would draw the same. Leave {path!r} out"
            if not run.step(place, operator, wanted):
                return f"torch has no rule to compute {str(site)!r} on parts. Leave module {path!r} out of `ops`"
    return None


class Parts(NamedTuple):
    """How ranks compute parts of a call of a module."""

    dim: int
    """Dim along which its inputs are cut."""

    placed: tuple[tuple[Site, tuple[int, ...]], ...]
    """Its operators, and the dim along which each of their outputs is cut then."""


def parts_of(captured: Captured, operators: Sequence[int], ranks: int) -> Parts | None:
    """Return how so many ranks can compute equal parts of a run of operators, sending nothing in between; None if not.

    Args:
        captured: A step.
        operators: Positions of all operators of one call of a module.
        ranks: Their number.
    """
    named = dict(_numbered(captured))
    if any(place not in named or _draws(captured.operators[place]) for place in operators):
        return None
    for dim in range(_TRIED_DIMS):
        placed = _followed(captured, operators, _Followed(ranks, inputs_cut=dim, within=operators))
        if placed is not None:
            return Parts(dim, tuple((named[place], dims) for place, dims in placed))
    return None


def form_of(captured: Captured, operators: Sequence[int]) -> tuple[object, ...]:
    """Return what `parts_of` goes by: names and arguments, in which tensors are shapes and where they come from."""
    order = {place: number for number, place in enumerate(operators)}

    def from_where(read: Read) -> Argument:
        inside = order.get(read.source) if isinstance(read.source, int) else None
        outside = "made" if isinstance(read.source, int) else read.source.partition(":")[0]
        return replace(read, source=outside if inside is None else inside, output=0 if inside is None else read.output)

    form: list[object] = []
    for operator in (captured.operators[place] for place in operators):
        form += operator.name, operator.phase, operator.outputs
        form += (with_reads(argument, from_where) for argument in operator.arguments)
        form += ((name, with_reads(value, from_where)) for name, value in operator.keywords)
    return tuple(form)


def _followed(captured: Captured, operators: Sequence[int], run: _Followed) -> list[tuple[int, tuple[int, ...]]] | None:
    """Return along which dims DTensor cuts the outputs of operators; None if it moves anything, or has no rule."""
    placed = []
    for place in operators:
        operator = captured.operators[place]
        is_whole = all(run.is_whole(read) for read in operator.reads())
        if not run.step(place, operator, moves=False):
            return None
        dims = run.even_dims(place, operator)
        if not is_whole and dims is None:
            return None
        if dims is not None:
            placed.append((place, dims))
    return placed or None


def _draws(operator: Operator) -> bool:
    function = _function(operator.name)
    if function is not None and torch.Tag.nondeterministic_seeded in function.tags:
        drops = [value for value in operator.arguments if isinstance(value, float) and value > 0]
        return "attention" not in operator.name or bool(drops)
    return False


class _Followed:
    """A run of operators on DTensors that are only shapes; what comes from outside is whole, or cut along a dim."""

    def __init__(self, ranks: int, inputs_cut: int | None = None, within: Sequence[int] = ()) -> None:
        from phalanx.parallel.operators import (
            layouts as layouts,  # imports DTensor: a second that few wait for
        )

        self._rules, self._ranks = layouts, ranks
        self._inputs_cut, self._within = inputs_cut, frozenset(within)
        self._mesh: DeviceMesh = layouts.bare_mesh(ranks)
        self._made: dict[tuple[int, int], Any] = {}

    def placement(self, dim: int | None) -> Placement:
        """Return where a tensor lies that is whole, or cut along a dim."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor import Shard as Cut

        return Replicate() if dim is None else Cut(dim)

    def is_whole(self, read: Read) -> bool:
        """Return whether an operator finds a tensor whole."""
        return bool(self._spec(read).placements[0].is_replicate())

    def step(self, place: int, operator: Operator, wanted: Sequence[Placement] = (), *, moves: bool = True) -> bool:
        """Compute an operator, its outputs as wanted if that is said; return whether torch can."""
        function = _function(operator.name)
        if function is None:
            return False
        args = tuple(_real(with_reads(argument, self._spec)) for argument in operator.arguments)
        kwargs = {name: _real(with_reads(value, self._spec)) for name, value in operator.keywords}
        if wanted and not wanted[0].is_replicate() and len(set(wanted)) == 1:
            chosen = self._rules.inputs_for(function, args, kwargs, wanted[0])
            if chosen is not None:
                args, kwargs = self._rules.with_placements(args, kwargs, chosen)
        made = self._rules.outputs_of(function, args, kwargs, moves=moves)
        if made is None:
            return False
        self._keep(place, made, wanted)
        return True

    def even_dims(self, place: int, operator: Operator) -> tuple[int, ...] | None:
        """Return along which dim each output of an operator is cut into equal parts; None if one is not."""
        dims = []
        for output, shape in enumerate(operator.outputs):
            spec = self._made.get((place, output))
            placed = None if spec is None else spec.placements[0]
            if placed is None or not placed.is_shard() or shape.shape[placed.dim] % self._ranks:
                return None
            dims.append(int(placed.dim))
        return tuple(dims)

    def _keep(self, place: int, made: Sequence[Any], wanted: Sequence[Placement]) -> None:
        for output, spec in enumerate(made):
            if spec is not None:
                self._made[place, output] = self._rules.with_placement(spec, wanted[output]) if wanted else spec

    def _spec(self, read: Read) -> Any:
        made = self._made.get((read.source, read.output)) if isinstance(read.source, int) else None
        if made is not None and tuple(made.shape) == read.value.shape:
            return made
        spec = self._rules.spec_of(self._mesh, read.value.shape, getattr(torch, read.value.dtype))
        dim, is_input = self._inputs_cut, isinstance(read.source, int) or read.source.startswith("sample:")
        if dim is None or not is_input or read.source in self._within or len(read.value.shape) <= dim:
            return spec
        return self._rules.with_placement(spec, self.placement(dim))


def _real(argument: Any) -> Any:
    """Return an argument as torch takes it: captures tell dtypes and the like in words, and lists as tuples."""
    if isinstance(argument, tuple):
        return [_real(part) for part in argument]
    if isinstance(argument, str) and argument.startswith("torch."):
        return getattr(torch, argument.removeprefix("torch."))
    return argument


def _function(name: str) -> Any:
    """Return torch's operator of a name; None where operators are told put together."""
    if not re.fullmatch(r"\w+\.\w+\.\w+", name):
        return None
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)


def _numbered(captured: Captured) -> list[tuple[int, Site]]:
    """Return position and site of every operator of the forward pass."""
    met: Counter[tuple[str, int]] = Counter()
    found: list[tuple[int, Site]] = []
    for place, operator in enumerate(captured.operators):
        if operator.phase == "forward":
            call = operator.module, operator.call
            found.append((place, Site(operator.module, met[call], operator.name)))
            met[call] += 1
    return found
