"""The layers of a captured model as a planner sees them, and the ways in which each may be computed (pure)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phalanx.auto.capture.graph import Captured
from phalanx.auto.capture.module_calls import Input, Segment
from phalanx.auto.capture.operator_sites import form_of, parts_of
from phalanx.auto.capture.partition_points import Pieces
from phalanx.plan.rules.tensor import Style

State = Literal["whole", "features", "tokens"]
"""How an activation stands between layers whose ranks read the same rows: whole, or cut along the last dim, or along
the one before, in which the tokens of a sequence follow each other."""


class Way(NamedTuple):
    """How a part of the model is computed."""

    style: Style | Literal["parts"] | None
    """Style of `px.shard`, or `parts`: its operators are placed, each computed in parts
    (`auto/capture/operator_sites`). None as it stands."""

    takes: State = "whole"
    """How its input arrives."""

    gives: State = "whole"
    """How its output leaves."""

    @property
    def takes_cut(self) -> bool:
        """Whether its input arrives cut along the last dim."""
        return self.takes == "features"

    @property
    def gives_cut(self) -> bool:
        """Whether its output leaves cut along the last dim."""
        return self.gives == "features"

    def takes_of(self, source: Input) -> State:
        """Return how one of its inputs arrives; masks and the like may be whole where activations are cut."""
        if self.takes == "features":
            return "features" if source.follows or self.style is not None else "whole"
        return self.takes if isinstance(source.source, int) else "whole"

    def __str__(self) -> str:
        if self.style in (None, "sequence"):
            return {"whole": "whole", "features": "cut as it comes", "tokens": "on its tokens"}[self.takes]
        taken, given = _WORDS[self.takes], _WORDS[self.gives]
        return f"{self.style}{f' from {taken}' if taken else ''}{f' to {given}' if given else ''}"


_WORDS: dict[State, str] = {"whole": "", "features": "cut", "tokens": "tokens"}

_TOKENS_TOO: tuple[State, ...] = ("whole", "tokens")
_CUT_TOO: tuple[State, ...] = ("whole", "features")

WHOLE = Way(None)
PARTS = Way("parts")

EVERY_WAY = (
    WHOLE,
    Way(None, "features", "features"),
    Way(None, "tokens", "tokens"),
    Way("sequence", "tokens", "tokens"),
    *(Way("column", taken, given) for taken in _TOKENS_TOO for given in _CUT_TOO),
    *(Way("row", taken, given) for taken in _CUT_TOO for given in _TOKENS_TOO),
    *(Way("vocab", gives=given) for given in _TOKENS_TOO),
    PARTS,
)


class Region(NamedTuple):
    """Layers between which activations stay cut."""

    parts: int
    """Number of ranks over which they are cut."""

    ways: frozenset[tuple[int, Way]]
    """By `Segment.like`."""


class Calls:
    """Which segments are alike, and which call a module or read a parameter that others do too."""

    def __init__(self, found: tuple[Segment, ...]) -> None:
        self.alike: dict[int, list[Segment]] = {}
        """By `Segment.like`."""

        users: dict[str, set[str]] = {}
        for segment in found:
            self.alike.setdefault(segment.like, []).append(segment)
            for param in segment.parameters:
                users.setdefault(param.name, set()).add(segment.path)
        self.once = {path for path, count in Counter(one.path for one in found).items() if count == 1}
        """Modules that run in one segment."""

        self.shared = {name for name, paths in users.items() if len(paths) > 1}
        """Parameters of several modules."""

        self.ends = {segment.like for segment in found if segment.is_returned}
        """By `Segment.like`, those whose outputs leave the model: who reads them is not known, and takes them whole."""

        self._forms: dict[int, tuple[object, ...]] = {}

    def form(self, captured: Captured, segment: Segment) -> tuple[object, ...]:
        """Return the form of a segment's operators."""
        if segment.like not in self._forms:
            self._forms[segment.like] = form_of(captured, segment.operators)
        return self._forms[segment.like]


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

    on_tokens: bool = True
    """Whether activations may be cut along their tokens between layers."""

    known_parts: dict[tuple[object, int], bool] = field(default_factory=dict, compare=False, repr=False)
    """Whether so many ranks can compute parts of a segment, by the form of its operators; kept over searches."""

    calls: Calls = field(init=False, compare=False, repr=False)
    """How segments are called."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", Calls(self.segments))

    def has_parts(self, segment: Segment, ranks: int) -> bool:
        """Return whether so many ranks can compute parts of a call of a module, operator by operator."""
        key = self.calls.form(self.captured, segment), ranks
        if key not in self.known_parts:
            self.known_parts[key] = parts_of(self.captured, segment.operators, ranks) is not None
        return self.known_parts[key]
