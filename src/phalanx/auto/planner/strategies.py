"""The ways to compute each part of a captured model under one arrangement of the ranks, as choices (pure).

A way is a style of `px.shard`, or none. Between layers whose ranks read the same rows, activations are whole or cut
along their last dim; a way says how it takes and gives them, and neighbours must agree. Layers that are cut over ranks
that read other rows take and give a rank's own rows whole, so these ways know nothing of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.auto.capture.layers import PARTS, WHOLE, Layers, Way
from phalanx.auto.capture.module_calls import Segment
from phalanx.auto.cost.layer_strategy import WayCost
from phalanx.auto.cost.machine_model import Speed
from phalanx.auto.cost.parallel_config import Arrangement
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.auto.solver.pipeline_problem import StagedChoices
from phalanx.auto.solver.problem import Choices, Link, Node


@dataclass(frozen=True, slots=True)
class Ways:
    """The choices of an arrangement, and what each stands for."""

    choices: Choices | StagedChoices
    ways: Mapping[str, tuple[Way, ...]]
    """By decision, in the order of the options."""


class Kind(NamedTuple):
    """What of an arrangement decides which ways there are."""

    model: int
    by_rows: int
    """Ranks that read other rows, over which layers may be cut; 1 if they may not."""

    in_stages: bool
    leaves_parts: bool
    """Whether rows divide among all ranks, and no backward pass is taken apart or computed again by operators."""


@dataclass(frozen=True, slots=True)
class Listed:
    """The ways of the segments, and which of them go together."""

    ways: Mapping[str, tuple[Way, ...]]
    """By decision, the whole first."""

    links: tuple[Link, ...]
    forbidden: tuple[frozenset[tuple[str, int]], ...]
    needed: frozenset[tuple[str, int]]


class Listing:
    """The ways of a model, listed once for all arrangements that have the same."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self._known: dict[Kind, Listed] = {}

    def of(self, at: Arrangement) -> Listed:
        """Return the ways under an arrangement."""
        divides = at.rows % (at.data * at.model * at.micro_batches) == 0
        leaves_parts = at.model > 1 and divides and at.recompute != "selective" and not at.zero_bubble
        kind = Kind(at.model, at.data if at.cuts_by_rows else 1, at.stages > 1, leaves_parts)
        if kind not in self._known:
            self._known[kind] = self._listed(kind)
        return self._known[kind]

    def _listed(self, kind: Kind) -> Listed:
        found = _Found(self.layers, kind)
        ways = {str(like): found.ways(alike[0]) for like, alike in self.layers.calls.alike.items()}
        # Ranks that read the same rows and cut no layer would all do the same.
        needed = frozenset(_cuts(ways)) if kind.model > 1 else frozenset[tuple[str, int]]()
        return Listed(ways, tuple(found.links(ways)), tuple(found.forbidden(ways)), needed)


def ways_of(
    layers: Layers,
    work: LayerWork,
    arrangement: Arrangement,
    speed: Speed,
    room: float = math.inf,
    listed: Listed | None = None,
) -> Ways:
    """Return all ways to compute a model under one arrangement.

    Args:
        layers: The model.
        work: What its segments take.
        arrangement: Of the ranks.
        speed: How fast they are.
        room: Bytes that each has.
        listed: Its ways, where they are known.
    """
    found = listed or Listing(layers).of(arrangement)
    cost = WayCost(layers, work, arrangement, speed)
    nodes: list[Node] = []
    for place, one in enumerate(work.all):
        segment, decision = one.segment, str(one.segment.like)
        name = f"{place}:{segment.path or segment.kind}"
        nodes.append(Node(name=name, decision=decision, options=cost.options(one, found.ways[decision])))
    links, forbidden, needed = found.links, found.forbidden, found.needed
    if arrangement.stages == 1:
        together = Choices(
            nodes=tuple(nodes), links=links, forbidden=forbidden, needed=needed, room=room, contention=speed.contention
        )
        return Ways(together, found.ways)
    assert layers.pieces is not None
    parts, where = arrangement.row_parts, arrangement.over_stages
    staged = StagedChoices(
        nodes=tuple(nodes),
        pieces=layers.pieces.of,
        sends=tuple(2 * speed.collective_s("send", size / parts, where) for size in layers.pieces.crossing),
        ranks=arrangement.stages,
        virtual=arrangement.virtual,
        micro_batches=arrangement.micro_batches,
        zero_bubble=arrangement.zero_bubble,
        links=links,
        forbidden=forbidden,
        needed=needed,
        room=room,
    )
    return Ways(staged, found.ways)


def _cuts(ways: Mapping[str, tuple[Way, ...]]) -> Iterable[tuple[str, int]]:
    for decision, found in ways.items():
        yield from ((decision, place) for place, way in enumerate(found) if way.style is not None)


class _Found:
    """The ways of the segments, and which of them do not go together."""

    def __init__(self, layers: Layers, kind: Kind) -> None:
        self._layers, self._kind, self._calls = layers, kind, layers.calls

    def ways(self, segment: Segment) -> tuple[Way, ...]:
        """Return the ways of a segment and of all that are like it, the whole first."""
        alike = self._calls.alike[segment.like]
        found = [WHOLE]
        if self._kind.model > 1:
            if self._passes_cut(alike):
                found.append(Way(None, "features", "features"))
            if self._layers.on_tokens:
                found += self._ways_on_tokens(alike)
            found += self._layer_ways(alike, self._kind.model, same_rows=True)
            if self._is_placeable(alike):
                found.append(PARTS)
        elif self._kind.by_rows > 1:
            found += self._layer_ways(alike, self._kind.by_rows, same_rows=False)
        if segment.like in self._calls.ends:
            found = [way for way in found if way.gives == "whole"]
        return tuple(way for way in found if (segment.like, way) not in self._layers.unwanted)

    def forbidden(self, ways: Mapping[str, tuple[Way, ...]]) -> Iterable[frozenset[tuple[str, int]]]:
        """Yield options that do not run together."""
        for region in self._layers.failing:
            known = all(way in ways[str(like)] for like, way in region.ways)
            if region.parts == self._kind.model and known:
                yield frozenset((str(like), ways[str(like)].index(way)) for like, way in region.ways)

    def _layer_ways(self, alike: list[Segment], ranks: int, *, same_rows: bool) -> Iterable[Way]:
        first = alike[0]
        weight = next((param for param in first.parameters if len(param.shape) == 2), None)
        if weight is None or not all(self._can_be_cut(one) for one in alike):
            return
        if first.kind == "Embedding" and same_rows and weight.shape[0] >= ranks:
            yield Way("vocab")
        if first.kind != "Linear":
            return
        if weight.shape[0] >= ranks:
            yield Way("column")
            if same_rows:
                yield Way("column", gives="features")
        if weight.shape[1] >= ranks:
            yield Way("row")
            if same_rows and _has_makers(alike):
                yield Way("row", "features")

    def _ways_on_tokens(self, alike: list[Segment]) -> Iterable[Way]:
        """Yield the ways that take or give activations of which each rank has some of the tokens."""
        first, ranks = alike[0], self._kind.model
        if any(len(shape.shape) < 3 or shape.shape[-2] % ranks for one in alike for shape in one.outputs):
            return
        if first.token_parts and all(one.token_parts % ranks == 0 and not self._drops(one) for one in alike):
            if not any(one.parameters for one in alike):
                yield Way(None, "tokens", "tokens")
            elif not first.is_glue and all(map(self._is_alone, alike)):
                yield Way("sequence", "tokens", "tokens")
        for way in tuple(self._layer_ways(alike, ranks, same_rows=True)):
            if way.style in ("row", "vocab") and (way.style == "vocab" or way.takes_cut):
                yield way._replace(gives="tokens")
            if way.style == "column" and _has_makers(alike):
                yield way._replace(takes="tokens")

    def _is_placeable(self, alike: list[Segment]) -> bool:
        """Return whether ranks can compute parts of the operators of these modules, each with as many rows."""
        kind, first = self._kind, alike[0]
        # With stages they double the decisions of a program that is large already (a ResNet-50 on small images: 4 s to
        # 33 s), so there they are tried where the user wants them.
        if kind.in_stages and (first.like, WHOLE) not in self._layers.unwanted:
            return False
        if not kind.leaves_parts:
            return False
        if not all(one.path in self._calls.once and not one.is_glue and one.outputs for one in alike):
            return False
        if first.kind in ("Linear", "Embedding"):  # they have styles of their own
            return False
        return self._layers.has_parts(first, kind.model)

    def _passes_cut(self, alike: list[Segment]) -> bool:
        """Return whether a cut goes through segments, none of whose cut inputs comes from outside all segments."""
        return all(
            one.last_dim_parts
            and one.last_dim_parts % self._kind.model == 0
            and not any(source.follows and isinstance(source.source, str) for source in one.inputs)
            and not self._drops(one)
            for one in alike
        )

    def _drops(self, one: Segment) -> bool:
        """Return whether parts of a segment would draw the same random numbers: a module for it knows better."""
        return one.kind != "Dropout" and any(map(self._draws, one.operators))

    def _draws(self, place: int) -> bool:
        """Return whether an operator draws random numbers."""
        operator = self._layers.captured.operators[place]
        if "attention" in operator.name:
            return any(isinstance(value, float) and value > 0 for value in operator.arguments)  # its dropout
        return "dropout" in operator.name or "bernoulli" in operator.name

    def _can_be_cut(self, segment: Segment) -> bool:
        """Return whether a layer can have a style, is called once, and holds its parameters alone."""
        return self._is_alone(segment) and segment.path in self._layers.may_be_cut

    def _is_alone(self, segment: Segment) -> bool:
        """Return whether a module is called once, and nobody else has its parameters."""
        return segment.path in self._calls.once and not any(
            param.name in self._calls.shared for param in segment.parameters
        )

    def links(self, ways: Mapping[str, tuple[Way, ...]]) -> Iterable[Link]:
        """Yield which ways of neighbours leave an activation in another state than it is taken in."""
        if self._kind.model == 1:
            return
        segments = self._layers.segments
        met: set[tuple[str, str, bool]] = set()
        for segment in segments:
            for source in segment.inputs:
                if isinstance(source.source, str):
                    continue  # what is no segment's is whole, and only arrives at ways that take it so
                pair = str(segments[source.source].like), str(segment.like)
                if (*pair, source.follows) in met:
                    continue
                met.add((*pair, source.follows))
                apart = {
                    (i, j): math.inf
                    for i, one in enumerate(ways[pair[0]])
                    for j, two in enumerate(ways[pair[1]])
                    if one.gives != two.takes_of(source)
                }
                if apart:
                    yield Link(first=pair[0], second=pair[1], seconds=apart)


def _has_makers(alike: list[Segment]) -> bool:
    """Return whether all inputs are what other segments made: others are whole."""
    return all(isinstance(source.source, int) for one in alike for source in one.inputs)
