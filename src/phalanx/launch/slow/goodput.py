"""`Goodput`: how much of a job's time went into steps, and where the rest was lost (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.launch.slow.stragglers import Losses
from phalanx.launch.slow.words import rank_title
from phalanx.units import format_length

MAX_CAUSES = 6
"""How many causes of lost time are named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """What was made of the time of a run."""

    total_s: float
    start_s: float
    """Until the first steps."""

    losses: Losses
    """What its ranks lost while they trained."""

    stalls: Sequence[tuple[float, str]] = ()
    """Seconds for which the ranks of an elastic job stood still, each with its cause."""

    redone: int = 0
    """Samples that were computed again."""

    @property
    def good_s(self) -> float:
        """Seconds that went into steps."""
        return max(0.0, self.total_s - self.start_s - sum(seconds for seconds, _ in self._lost))

    @property
    def _lost(self) -> list[tuple[float, str]]:
        """Seconds after the start that were lost, with their causes, the longest first."""
        waits = [(each.lost_s, f"waits for {rank_title(each.rank)}") for each in self.losses.stragglers]
        common = [(each.seconds, each.cause) for each in self.losses.common]
        return sorted([*self.stalls, *waits, *common], reverse=True)

    def describe(self) -> str:
        """Return it in one line: `goodput 87.1 %: 52:14 of steps in 1:00:00; lost: 60.0 s start`."""
        lost = self._lost
        causes = [f"{seconds:.1f} s {cause}" for seconds, cause in [(self.start_s, "start"), *lost[:MAX_CAUSES]]]
        if rest := lost[MAX_CAUSES:]:
            causes.append(f"{sum(seconds for seconds, _ in rest):.1f} s in {len(rest)} more")
        share = self.good_s / max(self.total_s, 1e-9)
        good, total = (format_length(seconds, digits=1) for seconds in (self.good_s, self.total_s))
        line = f"goodput {100 * share:.1f} %: {good} of steps in {total}; lost: {', '.join(causes)}"
        return line + (f"; {self.redone} samples computed again" if self.redone else "")
