"""The layers of a captured model as a planner sees them, and the ways in which each may be computed (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from phalanx.auto.graph import Captured
from phalanx.auto.pieces import Pieces
from phalanx.auto.segments import Segment
from phalanx.plan.tensor_rules import Style


class Way(NamedTuple):
    """How a part of the model is computed."""

    style: Style | None
    """Style of `px.shard`; None as it stands."""

    takes_cut: bool = False
    """Whether its input arrives cut along the last dim."""

    gives_cut: bool = False
    """Whether its output leaves cut along the last dim."""

    def __str__(self) -> str:
        if self.style is None:
            return "cut as it comes" if self.takes_cut else "whole"
        cut = " from cut" if self.takes_cut else " to cut" if self.gives_cut else ""
        return f"{self.style}{cut}"


WHOLE = Way(None)

EVERY_WAY = (
    WHOLE,
    Way(None, takes_cut=True, gives_cut=True),
    Way("column"),
    Way("column", gives_cut=True),
    Way("row"),
    Way("row", takes_cut=True),
    Way("vocab"),
)


class Region(NamedTuple):
    """Layers between which activations stay cut."""

    parts: int
    """Number of ranks over which they are cut."""

    ways: frozenset[tuple[int, Way]]
    """By `Segment.like`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """A captured model, the optimizer it trains with, and what its layers may not be."""

    captured: Captured
    segments: tuple[Segment, ...]
    may_be_cut: frozenset[str]
    """Paths of the layers that can have a style."""

    optimizer: str = "sgd"
    """`sgd`, `momentum` or `adam`."""

    blocks: tuple[str, ...] = ()
    """Paths of the repeated blocks, none inside another: what may be computed again."""

    pieces: Pieces | None = None
    """Where the model may be cut into stages; None if it cannot be."""

    unwanted: frozenset[tuple[int, Way]] = frozenset()
    """Ways that the user does not want, by `Segment.like`."""

    failing: frozenset[Region] = frozenset()
    """Ways that do not run together."""
