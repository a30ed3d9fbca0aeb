"""Which techniques go together: for every pair one verdict and, where they do not, the reason."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from phalanx.strategy.techniques import TECHNIQUES

Verdict = Literal["supported", "error", "pending"]


@dataclass(frozen=True, slots=True)
class Pair:
    """What becomes of two techniques at once."""

    verdict: Verdict
    why: str = ""


def verdict(first: str, second: str) -> Pair:
    """Return what becomes of two techniques at once."""
    for name, other in ((first, second), (second, first)):
        technique = TECHNIQUES[name]
        if other in technique.conflicts:
            return Pair("error", technique.conflicts[other])
        if other in technique.pending:
            return Pair("pending", technique.pending[other])
    return Pair("supported")


def first_conflict(on: set[str]) -> tuple[str, str, Pair] | None:
    """Return the first two of these techniques that do not go together, and why."""
    for first, second in itertools.combinations([name for name in TECHNIQUES if name in on], 2):
        pair = verdict(first, second)
        if pair.verdict != "supported":
            return first, second, pair
    return None


def table() -> str:
    """Return every pair as a Markdown table, and the reasons below it."""
    letters = {"supported": "✓", "error": "✗", "pending": "…"}
    short = {name: name.replace("use_hierarchical_allreduce", "hierarchical").replace("_", " ") for name in TECHNIQUES}
    lines = ["| |" + "|".join(f" {short[name]} " for name in TECHNIQUES) + "|", "|---|" + ":-:|" * len(TECHNIQUES)]
    for row in TECHNIQUES:
        cells = ("" if row == column else letters[verdict(row, column).verdict] for column in TECHNIQUES)
        lines.append(f"| **{row}** | " + " | ".join(cells) + " |")
    lines.append("")
    for first, second in itertools.combinations(TECHNIQUES, 2):
        pair = verdict(first, second)
        if pair.why:
            lines.append(f"- {letters[pair.verdict]} `{first}` with `{second}`: {pair.why}.")
    return "\n".join(lines)
