"""`every_candidate`: the Plans of a small model that `bench_plans` chooses from, by the styles of its large layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from phalanx.auto.planner.candidate import Candidate
from phalanx.auto.planner.planner import list_configs
from phalanx.auto.planner.report.result import PlanResult
from phalanx.errors import PlanError

GRID: dict[str, dict[tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "transformer": {
        ("tokens",): (("whole",), ("vocab",)),
        ("blocks.*.[qkv]", "blocks.*.o"): (("whole", "whole"), ("column", "row"), ("column", "whole"), ("row", "row")),
        ("blocks.*.mlp.0", "blocks.*.mlp.2"): (("whole", "whole"), ("column", "row"), ("whole", "row"), ("row", "row")),
        ("head",): (("whole",), ("column",), ("row",)),
    },
    "gpt": {
        ("tokens",): (("whole",), ("vocab",)),
        ("blocks.*.qkv", "blocks.*.o"): (("whole", "whole"), ("column", "row"), ("row", "row")),
        ("blocks.*.mlp.0", "blocks.*.mlp.2"): (("whole", "whole"), ("column", "row"), ("row", "row")),
        ("head",): (("whole",), ("column",), ("row",)),
    },
    "tied_gpt": {
        ("places",): (("whole",), ("vocab",)),
        ("blocks.*.qkv", "blocks.*.o"): (("whole", "whole"), ("column", "row"), ("row", "row")),
        ("blocks.*.mlp.0", "blocks.*.mlp.2"): (("whole", "whole"), ("column", "row"), ("row", "row")),
    },
    "alexnet": {(f"classifier.{place}",): (("whole",), ("column",), ("row",)) for place in (0, 2, 4)},
}
"""Layers that are styled together, and in which styles."""


def every_candidate(answer: PlanResult, name: str, ranks: int) -> Iterator[Candidate]:
    """Yield the best Plan of every arrangement and every combination of styles in the grid, each once."""
    seen = set()
    grid = GRID[name]
    for config in list_configs(ranks, has_blocks=bool(answer.layers.blocks)):
        degrees = (f"dp={config.data}", f"tp={config.model}", f"zero={config.zero}", f"recompute={config.recompute}")
        for styles in itertools.product(*grid.values()):
            chosen = [
                f"{layer}={style}"
                for layers, group in zip(grid, styles, strict=True)
                for layer, style in zip(layers, group, strict=True)
            ]
            try:
                candidate = answer.search_again((*degrees, *chosen)).best
            except PlanError:
                continue  # no such styles under this arrangement
            key = str(config), tuple(candidate.strategies.items())
            if key not in seen:
                seen.add(key)
                yield candidate


def chosen_of(candidates: list[Candidate], most: int) -> list[Candidate]:
    """Return at most so many of all Plans, the fastest and the slowest among them, evenly over the order."""
    ordered = sorted(candidates, key=lambda candidate: candidate.step_time_s)
    step = max(1.0, (len(ordered) - 1) / (most - 1))
    return [ordered[round(place * step)] for place in range(min(most, len(ordered)))]
