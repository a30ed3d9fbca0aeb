"""`SearchResult`: ranked candidates with an optimality bound, and `why_not` (pure).

Both searches return it: that for a module (`auto/planner`) and that for a transformer run spec (`auto/search/search`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from phalanx.cluster.spec.devices import GIB
from phalanx.errors import ConfigError, PlanError
from phalanx.i18n import tr
from phalanx.units import format_seconds


class Ranked(Protocol):
    """A candidate of a search, as far as results compare candidates."""

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of a step, by which candidates are ranked."""

    @property
    def memory_bytes(self) -> float:
        """Bytes of the peak rank."""

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds of a step by cause."""

    def part_label(self, part: str) -> str:
        """Return the name of a cause, in the user's language."""

    def is_same_as(self, other: object) -> bool:
        """Return whether another candidate is the same configuration."""


C = TypeVar("C", bound=Ranked)


@dataclass(frozen=True, kw_only=True)
class SearchResult(Generic[C]):
    """The fastest candidates of a search, and a bound that proves how good they are."""

    top_k: tuple[C, ...]
    """The fastest candidates, best first."""

    bound: float
    """Seconds of a step that no candidate of the space beats, by the cost model that the search goes by."""

    @property
    def best(self) -> C:
        """The fastest candidate."""
        return self.top_k[0]

    @property
    def proved_s(self) -> float:
        """Seconds of the fastest candidate by the cost model of the bound."""
        return self.best.step_time_s

    @property
    def gap(self) -> float:
        """How much slower than the bound the fastest candidate may be, in %."""
        return round((self.proved_s / self.bound - 1) * 100, 6)


def format_percent(value: float) -> str:
    """Return a percentage, such as a gap, in two digits, or as many as it has before the point."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def why_not(
    result: SearchResult[C],
    limits: Sequence[str],
    search_again: Callable[[Sequence[str]], SearchResult[C]],
    describe: Callable[[C], str] = str,
) -> str:
    """Return what it would cost to satisfy further limits.

    Args:
        result: Of the search without them.
        limits: The further limits, as the user wrote them.
        search_again: The same search with further limits.
        describe: Returns the configuration of a candidate in words.

    Raises:
        ConfigError: If no limit is given, or one is invalid.
    """
    if not limits:
        raise ConfigError(tr("why_not needs a limit, such as tp=1 or classifier.4=column."))
    words = ", ".join(limits)
    try:
        best, other = result.best, search_again(limits).best
    except PlanError as error:
        return tr("With {limits}: {why}", limits=words, why=error)
    if other.is_same_as(best):
        return tr(
            "The answer keeps to {limits} already: {config}, {step} a step.",
            limits=words,
            config=best,
            step=format_seconds(best.step_time_s),
        )
    changes = {name: other.parts[name] - best.parts[name] for name in best.parts}
    cause = max(changes, key=lambda name: changes[name])
    return tr(
        "With {limits} the best is {config}: {step} a step, {change}, {memory}; most of it {cause} ({more}).",
        limits=words,
        config=describe(other),
        step=format_seconds(other.step_time_s),
        change=f"{other.step_time_s / best.step_time_s - 1:+.1%}",
        memory=_format_more_bytes(other.memory_bytes - best.memory_bytes),
        cause=best.part_label(cause),
        more=_format_more_seconds(changes[cause]),
    )


def _format_more_bytes(size: float) -> str:
    return f"{size / GIB:+.1f} GiB" if abs(size) >= GIB else f"{size / 2**20:+.1f} MiB"


def _format_more_seconds(seconds: float) -> str:
    return f"{seconds:+.3g} s" if abs(seconds) >= 1 else f"{seconds * 1e3:+.3g} ms"
