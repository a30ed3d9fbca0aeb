"""Which techniques go together: for every pair one verdict and, where they do not, the reason."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["supported", "error", "pending"]

TECHNIQUES = (
    "graph",
    "amp",
    "recompute",
    "gradient_merge",
    "localsgd",
    "adaptive_localsgd",
    "lars",
    "lamb",
    "dgc",
    "fp16_allreduce",
    "use_hierarchical_allreduce",
    "sync_batch_norm",
    "sharding",
    "pipeline",
    "tensor_parallel",
    "context_parallel",
    "clip",
    "ema",
    "a_sync",
)
"""Switches of a strategy, in the order of the table."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What becomes of two techniques at once."""

    verdict: Verdict
    why: str = ""


_APART = "ranks that train apart exchange no gradients"
_WHOLE = "each rank must hold whole parameters to train apart"
_SPARSE = "what travels are the largest entries and their places"
_SERVERS = "dense parameters live on the servers"


def _errors() -> dict[frozenset[str], str]:
    reasons = {
        ("localsgd", "adaptive_localsgd"): "both say when parameters are averaged",
        ("lars", "lamb"): "both are the update rule",
        ("dgc", "lamb"): "DGC corrects the momentum of SGD",
        ("dgc", "lars"): "both carry the momentum of SGD",
        ("dgc", "fp16_allreduce"): _SPARSE,
        ("dgc", "use_hierarchical_allreduce"): _SPARSE,
        ("dgc", "sharding"): "each rank would need the residuals of whole gradients",
        ("use_hierarchical_allreduce", "sharding"): "sharded gradients are reduce-scattered",
    }
    for local in ("localsgd", "adaptive_localsgd"):
        for other in ("dgc", "fp16_allreduce", "use_hierarchical_allreduce"):
            reasons[local, other] = _APART
        for other in ("sharding", "pipeline", "tensor_parallel"):
            reasons[local, other] = _WHOLE
        reasons[local, "context_parallel"] = "ranks with parts of one sequence add up their gradients in every step"
        reasons[local, "sync_batch_norm"] = "synchronised layers make the ranks meet in every step"
    for other in (
        "localsgd", "adaptive_localsgd", "lars", "lamb", "dgc", "sharding", "pipeline", "tensor_parallel",
        "context_parallel", "ema",
    ):  # fmt: skip
        reasons["a_sync", other] = _SERVERS
    return {frozenset(pair): why for pair, why in reasons.items()}


_ERRORS = _errors()

_NOT_TRIED = "the two together are not there yet"

_PENDING: dict[frozenset[str], str] = {
    frozenset(("a_sync", other)): _NOT_TRIED
    for other in (
        "gradient_merge", "fp16_allreduce", "use_hierarchical_allreduce", "sync_batch_norm", "amp", "clip", "recompute",
    )
}  # fmt: skip
"""Pairs that make sense and are not there yet, and what is missing."""


def verdict(first: str, second: str) -> Pair:
    """Return what becomes of two techniques at once."""
    pair = frozenset((first, second))
    if pair in _ERRORS:
        return Pair("error", _ERRORS[pair])
    if pair in _PENDING:
        return Pair("pending", _PENDING[pair])
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
