"""`sites`, `find_operator_parts`: operators that a Plan can shard, by DTensor's rules on shapes (no devices).

`parallel/operators/placement` runs them. Here a region is followed on shapes, operator by operator, as it will run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from phalanx.auto.capture.graph import Argument, CapturedStep, Operator, Read, TensorShape, with_reads
from phalanx.errors import did_you_mean
from phalanx.plan.sites import Site, axis_of, regions
from phalanx.plan.value import Plan, Replicate, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

_MOST_SHOWN = 3

_TRIED_DIMS = 2
"""Dims along which inputs are cut: rows, and what follows them."""


def sites(captured: CapturedStep) -> dict[str, Operator]:
    """Return the operators of the forward pass by the words that a Plan names them with, in the order they run.

    A module that is called several times runs the same ones each time; they are named once.
    """
    return {str(site): captured.operators[position] for position, site in _list_sites(captured)}


def find_mismatch(captured: CapturedStep, plan: Plan) -> str | None:
    """Return why a Plan's rules for operators do not fit a captured step; None if they do."""
    if plan.capture_digest != captured.digest():
        return (
            f"they are of the step captured as {plan.capture_digest}, and this model's is {captured.digest()}: code or "
            "batch differ. Train with the global batch that was planned for, or make a new Plan for this step"
        )
    named = sites(captured)
    for rule in plan.ops:
        operator, count = named.get(rule.site), len(rule.outputs)
        if operator is None:
            few = [name for name in named if name.startswith(f"{rule.site.partition(':')[0]}:")][:_MOST_SHOWN]
            hint = did_you_mean(rule.site, named) or f" Found there: {', '.join(few) or 'none'}."
            return f"the captured step has no operator {rule.site!r}.{hint} Correct the Plan"
        if len(operator.outputs) != count:
            return f"ops[{rule.site}] has {count} outputs, the operator {len(operator.outputs)}. Say one of each"
        for layout, output in zip(rule.outputs, operator.outputs, strict=True):
            for placed in layout.values():
                if not _fits(placed, output):
                    return f"ops[{rule.site}] lays out {list(output.shape)} as {placed}. Replicate it, or cut a dim"
    return _find_unsupported_operator(captured, plan)


def _fits(placed: object, output: TensorShape) -> bool:
    if isinstance(placed, Shard):
        return placed.sizes is None and -len(output.shape) <= placed.dim < len(output.shape)
    return isinstance(placed, Replicate)


def _find_unsupported_operator(captured: CapturedStep, plan: Plan) -> str | None:
    """Return which operator of a region torch has no rule for; None if all can run."""
    axis = axis_of(plan)
    if axis is None:
        return None
    ranks = plan.axis_size(axis)
    rules = {rule.site: [layout.get(axis) for layout in rule.outputs] for rule in plan.ops}
    for path in regions(plan):
        run = _PlacementTrace(ranks)
        for position, site in _list_sites(captured):
            if not site.is_inside(path):
                continue
            operator = captured.operators[position]
            placements = [
                run.placement(placed.dim if isinstance(placed, Shard) else None) for placed in rules.get(str(site), ())
            ]
            if _draws(operator):
                return f"{str(site)!r} draws random numbers, of which parts would draw the same. Leave {path!r} out"
            if not run.step(position, operator, placements):
                return f"torch has no rule to compute {str(site)!r} on parts. Leave module {path!r} out of `ops`"
    return None


class OperatorParts(NamedTuple):
    """How ranks compute parts of a call of a module."""

    dim: int
    """Dim along which its inputs are cut."""

    placed: tuple[tuple[Site, tuple[int, ...]], ...]
    """Its operators, and the dim along which each of their outputs is cut then."""


def find_operator_parts(captured: CapturedStep, operators: Sequence[int], ranks: int) -> OperatorParts | None:
    """Return how so many ranks can compute equal parts of a run of operators, sending nothing in between; None if not.

    Args:
        captured: A step.
        operators: Positions of all operators of one call of a module.
        ranks: Their number.
    """
    named = dict(_list_sites(captured))
    if any(position not in named or _draws(captured.operators[position]) for position in operators):
        return None
    for dim in range(_TRIED_DIMS):
        placed = _follow_dims(captured, operators, _PlacementTrace(ranks, inputs_cut=dim, within=operators))
        if placed is not None:
            return OperatorParts(dim, tuple((named[position], dims) for position, dims in placed))
    return None


def operator_form(captured: CapturedStep, operators: Sequence[int]) -> tuple[object, ...]:
    """Return what `find_operator_parts` depends on: names and arguments, with tensors as shapes and sources."""
    order = {position: number for number, position in enumerate(operators)}

    def from_where(read: Read) -> Argument:
        inside = order.get(read.source) if isinstance(read.source, int) else None
        outside = "made" if isinstance(read.source, int) else read.source.partition(":")[0]
        return replace(read, source=outside if inside is None else inside, output=0 if inside is None else read.output)

    form: list[object] = []
    for operator in (captured.operators[position] for position in operators):
        form += operator.name, operator.phase, operator.outputs
        form += (with_reads(argument, from_where) for argument in operator.arguments)
        form += ((name, with_reads(value, from_where)) for name, value in operator.keywords)
    return tuple(form)


def _follow_dims(
    captured: CapturedStep, operators: Sequence[int], run: _PlacementTrace
) -> list[tuple[int, tuple[int, ...]]] | None:
    """Return along which dims DTensor cuts the outputs of operators; None if it moves anything, or has no rule."""
    placed = []
    for position in operators:
        operator = captured.operators[position]
        is_whole = all(run.is_whole(read) for read in operator.reads())
        if not run.step(position, operator, moves=False):
            return None
        dims = run.even_dims(position, operator)
        if not is_whole and dims is None:
            return None
        if dims is not None:
            placed.append((position, dims))
    return placed or None


def _draws(operator: Operator) -> bool:
    function = _torch_operator(operator.name)
    if function is not None and torch.Tag.nondeterministic_seeded in function.tags:
        drops = [value for value in operator.arguments if isinstance(value, float) and value > 0]
        return "attention" not in operator.name or bool(drops)
    return False


class _PlacementTrace:
    """A run of operators on DTensors without data; inputs are replicated, or sharded along a dim."""

    def __init__(self, ranks: int, inputs_cut: int | None = None, within: Sequence[int] = ()) -> None:
        from phalanx.parallel.operators import dtensor_rules  # imports DTensor: a second that few wait for

        self._rules, self._ranks = dtensor_rules, ranks
        self._inputs_cut, self._within = inputs_cut, frozenset(within)
        self._mesh: DeviceMesh = dtensor_rules.bare_mesh(ranks)
        self._specs: dict[tuple[int, int], Any] = {}

    def placement(self, dim: int | None) -> Placement:
        """Return the placement of a tensor that is replicated, or sharded along a dim."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor import Shard as Cut

        return Replicate() if dim is None else Cut(dim)

    def is_whole(self, read: Read) -> bool:
        """Return whether an operator reads a tensor replicated."""
        return bool(self._spec(read).placements[0].is_replicate())

    def step(
        self, position: int, operator: Operator, placements: Sequence[Placement] = (), *, moves: bool = True
    ) -> bool:
        """Compute an operator, its outputs with these placements if there are some; return whether torch can."""
        function = _torch_operator(operator.name)
        if function is None:
            return False
        args = tuple(_as_torch_argument(with_reads(argument, self._spec)) for argument in operator.arguments)
        kwargs = {name: _as_torch_argument(with_reads(value, self._spec)) for name, value in operator.keywords}
        if placements and not placements[0].is_replicate() and len(set(placements)) == 1:
            chosen = self._rules.inputs_for(function, args, kwargs, placements[0])
            if chosen is not None:
                args, kwargs = self._rules.with_placements(args, kwargs, chosen)
        specs = self._rules.outputs_of(function, args, kwargs, moves=moves)
        if specs is None:
            return False
        self._keep(position, specs, placements)
        return True

    def even_dims(self, position: int, operator: Operator) -> tuple[int, ...] | None:
        """Return along which dim each output of an operator is cut into equal parts; None if one is not."""
        dims = []
        for output, shape in enumerate(operator.outputs):
            spec = self._specs.get((position, output))
            placed = None if spec is None else spec.placements[0]
            if placed is None or not placed.is_shard() or shape.shape[placed.dim] % self._ranks:
                return None
            dims.append(int(placed.dim))
        return tuple(dims)

    def _keep(self, position: int, specs: Sequence[Any], placements: Sequence[Placement]) -> None:
        for output, spec in enumerate(specs):
            if spec is not None and placements:
                self._specs[position, output] = self._rules.with_placement(spec, placements[output])
            elif spec is not None:
                self._specs[position, output] = spec

    def _spec(self, read: Read) -> Any:
        known_spec = self._specs.get((read.source, read.output)) if isinstance(read.source, int) else None
        if known_spec is not None and tuple(known_spec.shape) == read.value.shape:
            return known_spec
        spec = self._rules.spec_of(self._mesh, read.value.shape, getattr(torch, read.value.dtype))
        dim, is_input = self._inputs_cut, isinstance(read.source, int) or read.source.startswith("sample:")
        if dim is None or not is_input or read.source in self._within or len(read.value.shape) <= dim:
            return spec
        return self._rules.with_placement(spec, self.placement(dim))


def _as_torch_argument(argument: Any) -> Any:
    """Return an argument as torch takes it: captures tell dtypes and the like in words, and lists as tuples."""
    if isinstance(argument, tuple):
        return [_as_torch_argument(part) for part in argument]
    if isinstance(argument, str) and argument.startswith("torch."):
        return getattr(torch, argument.removeprefix("torch."))
    return argument


def _torch_operator(name: str) -> Any:
    """Return torch's operator of a name; None for merged operators."""
    if not re.fullmatch(r"\w+\.\w+\.\w+", name):
        return None
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)


def _list_sites(captured: CapturedStep) -> list[tuple[int, Site]]:
    """Return position and site of every operator of the forward pass."""
    met: Counter[tuple[str, int]] = Counter()
    sites: list[tuple[int, Site]] = []
    for position, operator in enumerate(captured.operators):
        if operator.phase == "forward":
            call = operator.module, operator.call
            sites.append((position, Site(operator.module, met[call], operator.name)))
            met[call] += 1
    return sites
