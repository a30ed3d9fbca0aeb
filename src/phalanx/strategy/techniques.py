"""`Technique`: the techniques of a strategy (AMP, ZeRO, pipeline, ...) and their conflicts (pure)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_NO_GRADIENTS = "ranks that take local steps exchange no gradients"
_UNSHARDED = "each rank needs the full parameters to take local steps"
_SPARSE = "only the largest entries and their indices are sent"
_SERVERS = "dense parameters live on the servers"
_UNTESTED = "the combination is not supported yet"

_NOT_WITH_LOCAL_STEPS = {
    **dict.fromkeys(("dgc", "fp16_allreduce", "use_hierarchical_allreduce"), _NO_GRADIENTS),
    **dict.fromkeys(("sharding", "pipeline", "tensor_parallel"), _UNSHARDED),
    "context_parallel": "ranks with parts of one sequence add up their gradients in every step",
    "sync_batch_norm": "synchronised layers exchange statistics between the ranks in every step",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """One switch of a strategy; its settings are in the field `<name>_configs`, where it has some."""

    effect: str
    """What it does, for those who read a Plan; empty where rules say it themselves."""

    across_ranks: bool = False
    """Whether it does nothing with one rank."""

    conflicts: Mapping[str, str] = field(default_factory=dict)
    """Techniques it cannot be on together with, and why; each pair stands at one of the two."""

    pending: Mapping[str, str] = field(default_factory=dict)
    """Techniques with which it makes sense but is not there yet, and what is missing."""


TECHNIQUES: dict[str, Technique] = {
    "graph": Technique(effect="the forward pass and the loss are compiled"),
    "amp": Technique(effect="the forward pass runs in mixed precision"),
    "recompute": Technique(effect="activation checkpointing: named modules are recomputed in the backward pass"),
    "gradient_merge": Technique(effect="gradient accumulation: several batches make one update"),
    "localsgd": Technique(
        effect="ranks take local steps and average their parameters",
        across_ranks=True,
        conflicts={"adaptive_localsgd": "both decide when parameters are averaged", **_NOT_WITH_LOCAL_STEPS},
    ),
    "adaptive_localsgd": Technique(
        effect="ranks take local steps and average their parameters, less often while the loss is high",
        across_ranks=True,
        conflicts=_NOT_WITH_LOCAL_STEPS,
    ),
    "lars": Technique(
        effect="the step of each parameter follows its norm and its gradient's",
        conflicts={"lamb": "each of them replaces the update rule"},
    ),
    "lamb": Technique(effect="the step of each parameter follows its norm and its update's"),
    "dgc": Technique(
        effect="only the largest entries of gradients are sent",
        across_ranks=True,
        conflicts={
            "lamb": "DGC corrects the momentum of SGD",
            "lars": "both keep the momentum of SGD",
            "fp16_allreduce": _SPARSE,
            "use_hierarchical_allreduce": _SPARSE,
            "sharding": "each rank would need the residuals of the full gradients",
        },
    ),
    "fp16_allreduce": Technique(effect="gradients are sent in float16", across_ranks=True),
    "use_hierarchical_allreduce": Technique(
        effect="gradients are added up within each host first",
        across_ranks=True,
        conflicts={"sharding": "sharded gradients are reduce-scattered"},
    ),
    "sync_batch_norm": Technique(effect="batch normalisation over the samples of all ranks", across_ranks=True),
    "sharding": Technique(
        effect="each rank holds a part of optimizer state, gradients and parameters", across_ranks=True
    ),
    "pipeline": Technique(effect="each rank computes some stages of the model", across_ranks=True),
    "tensor_parallel": Technique(effect="layers that px.shard names are sharded over ranks", across_ranks=True),
    "context_parallel": Technique(
        effect="modules that px.shard names compute a part of the sequence on each rank", across_ranks=True
    ),
    "expert_parallel": Technique(
        effect="modules that px.shard names have some of their experts on each rank; tokens travel to theirs",
        across_ranks=True,
        conflicts={
            **dict.fromkeys(("localsgd", "adaptive_localsgd"), _UNSHARDED),
            "a_sync": _SERVERS,
        },
        pending={
            "sharding": "optimizer state would be sharded over ranks that hold different experts",
            "pipeline": "stages would have to exchange tokens within a micro-batch",
            "dgc": _UNTESTED,
        },
    ),
    "clip": Technique(effect="gradients are clipped before the update"),
    "ema": Technique(effect="an EMA of the weights is kept; px.ema_of(model) returns it"),
    "a_sync": Technique(
        effect="",
        conflicts=dict.fromkeys(
            (
                "localsgd", "adaptive_localsgd", "lars", "lamb", "dgc", "sharding", "pipeline", "tensor_parallel",
                "context_parallel", "ema",
            ),
            _SERVERS,
        ),
        pending=dict.fromkeys(
            (
                "gradient_merge", "fp16_allreduce", "use_hierarchical_allreduce", "sync_batch_norm", "amp", "clip",
                "recompute",
            ),
            _UNTESTED,
        ),
    ),
}  # fmt: skip
"""Every technique by the name of its switch, in the order of the tables."""

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


def conflict_table() -> str:
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
