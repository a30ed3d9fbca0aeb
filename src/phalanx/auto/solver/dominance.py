"""`reduce_problem`: merge decisions of the same pipeline pieces into one and drop dominated options (pure).

Of two picks of such decisions that look the same from outside, one that works, exchanges and holds no less than the
other in every piece is never needed: times and memory only grow with each. What is left is few, and the best of it is
the best of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.auto.solver.problem import LayerNode, StepProblem, StrategyCost, TransitionCost, fills_s

_MOST_PICKS = 3000
"""Picks of one group up to which they are compared with each other."""

_SUMS = (
    "forward_s",
    "backward_s",
    "weight_grad_s",
    "grad_sync_s",
    "persistent_bytes",
    "activation_bytes",
    "deferred_bytes",
)
"""What is added up over the decisions of a piece; `grad_sync_s` is all that comes after the passes."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReducedProblem:
    """The same step with fewer decisions."""

    problem: StepProblem
    """One node for each piece and group of decisions."""

    picks: Mapping[str, tuple[Mapping[str, int], ...]]
    """By merged decision, what each of its options stands for."""

    def original(self, pick: Mapping[str, int]) -> dict[str, int]:
        """Return what a pick of the merged decisions stands for."""
        return {name: index for group, o in pick.items() for name, index in self.picks[group][o].items()}


def reduce_problem(problem: StepProblem) -> ReducedProblem | None:
    """Return a step with its decisions merged; None if a group has too many picks that may be needed.

    None too of one stage, where it matters which node of a piece comes first. A group without any pick has none that is
    allowed: there is none of the whole step then.
    """
    if problem.stages == 1:
        return None
    where: dict[str, dict[int, None]] = {}
    for node, piece in zip(problem.nodes, problem.pieces, strict=True):
        where.setdefault(node.decision, {})[piece] = None
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, pieces in where.items():
        groups.setdefault(tuple(pieces), []).append(name)
    reduced_groups = [_Group(problem, pieces, names) for pieces, names in groups.items()]
    if not all(group.fill() for group in reduced_groups):
        return None
    if problem.needed and not any(pick.has_needed for group in reduced_groups for pick in group.picks):
        reduced_groups[0].picks = []
    nodes = sorted(
        ((piece, node) for group in reduced_groups for piece, node in group.nodes()), key=lambda entry: entry[0]
    )
    smaller = replace(
        problem,
        nodes=tuple(node for _, node in nodes),
        pieces=tuple(piece for piece, _ in nodes),
        transitions=tuple(_links(problem.transitions, reduced_groups)),
        forbidden=tuple(_forbidden(problem.forbidden, reduced_groups)),
        needed=frozenset(
            (group.name, o) for group in reduced_groups for o, pick in enumerate(group.picks) if pick.has_needed
        ),
    )
    return ReducedProblem(
        smaller, {group.name: tuple(pick.options for pick in group.picks) for group in reduced_groups}
    )


@dataclass(frozen=True, slots=True)
class _PartialPick:
    options: Mapping[str, int]
    sums: Floats
    """By piece: seconds of forward passes, of backward passes, of gradients of weights in these, of gradient
    synchronisation and update; persistent, activation and deferred bytes."""

    largest_bytes: Floats
    """What its largest node needs while it runs, and while the optimizer does; by kind and piece."""

    linked: float
    has_needed: bool


class _Group:
    """Decisions of the same pieces, and their picks."""

    def __init__(self, problem: StepProblem, pieces: tuple[int, ...], names: list[str]) -> None:
        self.name = names[0]
        self._problem, self._pieces, self.names = problem, pieces, names
        self._index_of = {piece: index for index, piece in enumerate(pieces)}
        first = _PartialPick({}, np.zeros((len(pieces), len(_SUMS))), np.zeros((2, len(pieces))), 0.0, False)
        self.picks: list[_PartialPick] = [first]

    def fill(self) -> bool:
        """List all picks that may be needed, decision after decision; return whether they are few enough."""
        costs = self._costs()
        for number, name in enumerate(self.names):
            extended = [longer for pick in self.picks for longer in self._extend(pick, name, costs[name])]
            if len(extended) > 20 * _MOST_PICKS:
                return False
            self.picks = self._drop_dominated(extended, self._visible_decisions(self.names[: number + 1]))
            if len(self.picks) > _MOST_PICKS:
                return False
        return True

    def nodes(self) -> Iterable[tuple[int, LayerNode]]:
        """Yield one node for each piece."""
        for index, piece in enumerate(self._pieces):
            options = []
            for pick in self.picks:
                sums = dict(zip(_SUMS, map(float, pick.sums[index]), strict=True))
                workspace, update = map(float, pick.largest_bytes[:, index])
                options.append(StrategyCost(label="", **sums, workspace_bytes=workspace, update_bytes=update))
            yield piece, LayerNode(name=f"{piece}:{self.name}", decision=self.name, options=tuple(options))

    def _costs(self) -> dict[str, list[tuple[Floats, Floats]]]:
        counts = self._problem.decisions
        shape = len(self._pieces), len(_SUMS)
        costs = {name: [(np.zeros(shape), np.zeros((2, shape[0]))) for _ in range(counts[name])] for name in self.names}
        for node, piece in zip(self._problem.nodes, self._problem.pieces, strict=True):
            index = self._index_of.get(piece)
            if index is None or node.decision not in costs:
                continue
            for (sums, largest), o in zip(costs[node.decision], node.options, strict=True):
                after = o.grad_sync_s + o.update_s
                sums[index] += (
                    o.forward_s,
                    o.backward_s,
                    o.weight_grad_s,
                    after,
                    o.persistent_bytes,
                    o.activation_bytes,
                    o.deferred_bytes,
                )
                largest[:, index] = np.maximum(largest[:, index], (o.workspace_bytes, o.update_bytes))
        return costs

    def _extend(self, pick: _PartialPick, name: str, costs: list[tuple[Floats, Floats]]) -> Iterable[_PartialPick]:
        for o, (sums, largest) in enumerate(costs):
            options = {**pick.options, name: o}
            linked = pick.linked + sum(
                _seconds(transition, options) for transition in self._problem.transitions if name in _ends(transition)
            )
            if linked == math.inf or any(
                self._is_forbidden(combination, name, options) for combination in self._problem.forbidden
            ):
                continue
            has_needed = pick.has_needed or (name, o) in self._problem.needed
            yield _PartialPick(options, pick.sums + sums, np.maximum(pick.largest_bytes, largest), linked, has_needed)

    def _is_forbidden(self, combination: frozenset[tuple[str, int]], name: str, options: Mapping[str, int]) -> bool:
        return name in dict(combination) and combination <= options.items()

    def _visible_decisions(self, done: list[str]) -> list[str]:
        """Return the decisions whose options matter to others than these."""
        inside, visible = set(done), set[str]()
        for transition in self._problem.transitions:
            visible |= {name for name in _ends(transition) if not inside.issuperset(_ends(transition))}
        for combination in self._problem.forbidden:
            names = {name for name, _ in combination}
            visible |= names if not inside >= names else set()
        return [name for name in done if name in visible]

    def _drop_dominated(self, candidates: list[_PartialPick], visible: list[str]) -> list[_PartialPick]:
        alike: dict[tuple[object, ...], list[_PartialPick]] = {}
        for pick in candidates:
            key = *(pick.options[name] for name in visible), pick.has_needed and bool(self._problem.needed)
            alike.setdefault(key, []).append(pick)
        return [pick for picks in alike.values() for pick in self._undominated(picks)]

    def _undominated(self, picks: list[_PartialPick]) -> list[_PartialPick]:
        vectors = np.array([self._cost_vector(pick) for pick in picks])
        costs = np.unique(vectors, axis=1) if len(vectors) > 1 else vectors
        order = np.argsort(costs.sum(axis=1), kind="stable")
        survivors: list[int] = []
        for index in order:
            if not survivors or not (costs[survivors] <= costs[index]).all(axis=1).any():
                survivors.append(int(index))
        return [picks[index] for index in survivors]

    def _cost_vector(self, pick: _PartialPick) -> Floats:
        """Return all of a pick that a step takes longer with or has no room for, the more there is of it."""
        forward, backward, weights, after = pick.sums[:, :4].T
        passes = [forward + backward] if self._problem.virtual == 1 else [forward, backward]
        seconds = [*passes, after, [pick.linked]]
        if self._problem.zero_bubble:
            seconds.append(-np.array(fills_s(forward.sum(), backward.sum(), weights.sum())))
        memory = [pick.sums[:, 4:].ravel(), pick.largest_bytes.ravel()] if self._problem.room < math.inf else []
        return np.concatenate([*seconds, *memory])


def _ends(transition: TransitionCost) -> tuple[str, str]:
    return transition.first, transition.second


def _seconds(transition: TransitionCost, options: Mapping[str, int]) -> float:
    """Return what a link costs if both of its ends are picked, else nothing so far."""
    if not options.keys() >= set(_ends(transition)):
        return 0.0
    return transition.seconds.get((options[transition.first], options[transition.second]), 0.0)


def _links(transitions: Sequence[TransitionCost], groups: list[_Group]) -> Iterable[TransitionCost]:
    """Yield what picks of two groups, or of one, cost together."""
    home = {name: group for group in groups for name in group.names}
    between: dict[tuple[str, str], list[TransitionCost]] = {}
    for transition in transitions:
        source, target = home.get(transition.first), home.get(transition.second)
        if source is not None and target is not None and source is not target:
            between.setdefault((source.name, target.name), []).append(transition)
    by_name = {group.name: group for group in groups}
    for (first, second), several in between.items():
        seconds = {
            (i, j): total
            for i, a in enumerate(by_name[first].picks)
            for j, b in enumerate(by_name[second].picks)
            if (total := sum(_seconds(transition, {**a.options, **b.options}) for transition in several))
        }
        if seconds:
            yield TransitionCost(first=first, second=second, seconds=seconds)
    for group in groups:
        own = {(o, o): pick.linked for o, pick in enumerate(group.picks) if pick.linked}
        if own:
            yield TransitionCost(first=group.name, second=group.name, seconds=own)


def _forbidden(
    forbidden: Sequence[frozenset[tuple[str, int]]], groups: list[_Group]
) -> Iterable[frozenset[tuple[str, int]]]:
    """Yield sets of merged options that hold a set of options over several groups."""
    for combination in forbidden:
        parts: list[list[tuple[str, int]]] = []
        for group in groups:
            inside = {(name, o) for name, o in combination if name in group.names}
            if inside:
                parts.append([(group.name, o) for o, p in enumerate(group.picks) if inside <= p.options.items()])
        if len(parts) > 1:
            yield from _products(parts)


def _products(parts: list[list[tuple[str, int]]]) -> Iterable[frozenset[tuple[str, int]]]:
    products: list[frozenset[tuple[str, int]]] = [frozenset()]
    for part in parts:
        products = [product | {other} for product in products for other in part]
    return products
