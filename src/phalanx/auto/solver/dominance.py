"""Decisions of a step in stages that stand in the same pieces, merged into one with the picks worth trying (pure).

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

from phalanx.auto.solver.pipeline_problem import StagedChoices
from phalanx.auto.solver.problem import Link, Node, Option, fills_s

_MOST_PICKS = 3000
"""Picks of one group up to which they are compared with each other."""

_SUMS = ("forward_s", "backward_s", "weights_s", "exchange_s", "held", "kept", "owed")
"""What is added up over the decisions of a piece; `exchange_s` is all that comes after the passes."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Merged:
    """The same step with fewer decisions."""

    choices: StagedChoices
    """One node for each piece and group of decisions."""

    picks: Mapping[str, tuple[Mapping[str, int], ...]]
    """By merged decision, what each of its options stands for."""

    def original(self, pick: Mapping[str, int]) -> dict[str, int]:
        """Return what a pick of the merged decisions stands for."""
        return {name: place for group, o in pick.items() for name, place in self.picks[group][o].items()}


def merged(choices: StagedChoices) -> Merged | None:
    """Return a step with its decisions merged; None if a group has too many picks that may be needed.

    A group without any pick has none that is allowed: there is none of the whole step then.
    """
    where: dict[str, dict[int, None]] = {}
    for node, piece in zip(choices.nodes, choices.pieces, strict=True):
        where.setdefault(node.decision, {})[piece] = None
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, pieces in where.items():
        groups.setdefault(tuple(pieces), []).append(name)
    found = [_Group(choices, pieces, names) for pieces, names in groups.items()]
    if not all(group.fill() for group in found):
        return None
    if choices.needed and not any(pick.has_needed for group in found for pick in group.picks):
        found[0].picks = []
    nodes = sorted(((piece, node) for group in found for piece, node in group.nodes()), key=lambda one: one[0])
    smaller = replace(
        choices,
        nodes=tuple(node for _, node in nodes),
        pieces=tuple(piece for piece, _ in nodes),
        links=tuple(_links(choices.links, found)),
        forbidden=tuple(_forbidden(choices.forbidden, found)),
        needed=frozenset((group.name, o) for group in found for o, pick in enumerate(group.picks) if pick.has_needed),
    )
    return Merged(smaller, {group.name: tuple(pick.options for pick in group.picks) for group in found})


@dataclass(frozen=True, slots=True)
class _Pick:
    options: Mapping[str, int]
    sums: Floats
    """By piece: forward and backward passes, of these gradients of weights, what comes after, held, kept, owed."""

    working: Floats
    """By piece."""

    linked: float
    has_needed: bool


class _Group:
    """Decisions of the same pieces, and their picks."""

    def __init__(self, choices: StagedChoices, pieces: tuple[int, ...], names: list[str]) -> None:
        self.name = names[0]
        self._choices, self._pieces, self.names = choices, pieces, names
        self._places = {piece: place for place, piece in enumerate(pieces)}
        first = _Pick({}, np.zeros((len(pieces), len(_SUMS))), np.zeros(len(pieces)), 0.0, False)
        self.picks: list[_Pick] = [first]

    def fill(self) -> bool:
        """List all picks that may be needed, decision after decision; return whether they are few enough."""
        costs = self._costs()
        for number, name in enumerate(self.names):
            made = [one for pick in self.picks for one in self._extended(pick, name, costs[name])]
            if len(made) > 20 * _MOST_PICKS:
                return False
            self.picks = self._worth_trying(made, self._seen_outside(self.names[: number + 1]))
            if len(self.picks) > _MOST_PICKS:
                return False
        return True

    def nodes(self) -> Iterable[tuple[int, Node]]:
        """Yield one node for each piece."""
        for place, piece in enumerate(self._pieces):
            options = []
            for pick in self.picks:
                sums = dict(zip(_SUMS, map(float, pick.sums[place]), strict=True))
                options.append(Option(label="", **sums, working=float(pick.working[place])))
            yield piece, Node(name=f"{piece}:{self.name}", decision=self.name, options=tuple(options))

    def _costs(self) -> dict[str, list[tuple[Floats, Floats]]]:
        counts = self._choices.decisions
        shape = len(self._pieces), len(_SUMS)
        costs = {name: [(np.zeros(shape), np.zeros(shape[0])) for _ in range(counts[name])] for name in self.names}
        for node, piece in zip(self._choices.nodes, self._choices.pieces, strict=True):
            place = self._places.get(piece)
            if place is None or node.decision not in costs:
                continue
            for (sums, working), o in zip(costs[node.decision], node.options, strict=True):
                after = o.exchange_s + o.update_s
                sums[place] += o.forward_s, o.backward_s, o.weights_s, after, o.held, o.kept, o.owed
                working[place] = max(working[place], o.working)
        return costs

    def _extended(self, pick: _Pick, name: str, costs: list[tuple[Floats, Floats]]) -> Iterable[_Pick]:
        for o, (sums, working) in enumerate(costs):
            options = {**pick.options, name: o}
            linked = pick.linked + sum(_seconds(link, options) for link in self._choices.links if name in _ends(link))
            if linked == math.inf or any(self._is_forbidden(one, name, options) for one in self._choices.forbidden):
                continue
            has_needed = pick.has_needed or (name, o) in self._choices.needed
            yield _Pick(options, pick.sums + sums, np.maximum(pick.working, working), linked, has_needed)

    def _is_forbidden(self, one: frozenset[tuple[str, int]], name: str, options: Mapping[str, int]) -> bool:
        return name in dict(one) and one <= options.items()

    def _seen_outside(self, done: list[str]) -> list[str]:
        """Return the decisions whose options matter to others than these."""
        inside, seen = set(done), set[str]()
        for link in self._choices.links:
            seen |= {one for one in _ends(link) if not inside.issuperset(_ends(link))}
        for one in self._choices.forbidden:
            names = {name for name, _ in one}
            seen |= names if not inside >= names else set()
        return [name for name in done if name in seen]

    def _worth_trying(self, made: list[_Pick], seen: list[str]) -> list[_Pick]:
        alike: dict[tuple[object, ...], list[_Pick]] = {}
        for pick in made:
            key = *(pick.options[name] for name in seen), pick.has_needed and bool(self._choices.needed)
            alike.setdefault(key, []).append(pick)
        return [pick for picks in alike.values() for pick in self._undominated(picks)]

    def _undominated(self, picks: list[_Pick]) -> list[_Pick]:
        rows = np.array([self._grown(pick) for pick in picks])
        costs = np.unique(rows, axis=1) if len(rows) > 1 else rows
        order = np.argsort(costs.sum(axis=1), kind="stable")
        kept: list[int] = []
        for place in order:
            if not kept or not (costs[kept] <= costs[place]).all(axis=1).any():
                kept.append(int(place))
        return [picks[place] for place in kept]

    def _grown(self, pick: _Pick) -> Floats:
        """Return all of a pick that a step takes longer with or has no room for, the more there is of it."""
        forward, backward, weights, after = pick.sums[:, :4].T
        seconds = [forward + backward, after, [pick.linked]]
        if self._choices.zero_bubble:
            seconds.append(-np.array(fills_s(forward.sum(), backward.sum(), weights.sum())))
        memory = [pick.sums[:, 4:].ravel(), pick.working] if self._choices.room < math.inf else []
        return np.concatenate([*seconds, *memory])


def _ends(link: Link) -> tuple[str, str]:
    return link.first, link.second


def _seconds(link: Link, options: Mapping[str, int]) -> float:
    """Return what a link costs if both of its ends are picked, else nothing so far."""
    if not options.keys() >= set(_ends(link)):
        return 0.0
    return link.seconds.get((options[link.first], options[link.second]), 0.0)


def _links(links: Sequence[Link], groups: list[_Group]) -> Iterable[Link]:
    """Yield what picks of two groups, or of one, cost together."""
    home = {name: group for group in groups for name in group.names}
    between: dict[tuple[str, str], list[Link]] = {}
    for link in links:
        first, second = home.get(link.first), home.get(link.second)
        if first is not None and second is not None and first is not second:
            between.setdefault((first.name, second.name), []).append(link)
    by_name = {group.name: group for group in groups}
    for (one, two), several in between.items():
        seconds = {
            (i, j): total
            for i, a in enumerate(by_name[one].picks)
            for j, b in enumerate(by_name[two].picks)
            if (total := sum(_seconds(link, {**a.options, **b.options}) for link in several))
        }
        if seconds:
            yield Link(first=one, second=two, seconds=seconds)
    for group in groups:
        own = {(o, o): pick.linked for o, pick in enumerate(group.picks) if pick.linked}
        if own:
            yield Link(first=group.name, second=group.name, seconds=own)


def _forbidden(
    forbidden: Sequence[frozenset[tuple[str, int]]], groups: list[_Group]
) -> Iterable[frozenset[tuple[str, int]]]:
    """Yield sets of merged options that hold a set of options over several groups."""
    for one in forbidden:
        parts: list[list[tuple[str, int]]] = []
        for group in groups:
            inside = {(name, o) for name, o in one if name in group.names}
            if inside:
                parts.append([(group.name, o) for o, p in enumerate(group.picks) if inside <= p.options.items()])
        if len(parts) > 1:
            yield from _products(parts)


def _products(parts: list[list[tuple[str, int]]]) -> Iterable[frozenset[tuple[str, int]]]:
    made: list[frozenset[tuple[str, int]]] = [frozenset()]
    for part in parts:
        made = [one | {other} for one in made for other in part]
    return made
