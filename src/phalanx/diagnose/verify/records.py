"""`RecordedRun`: what the ranks of a run recorded, read from its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.parallel.observe.sketch import Sketch

Rows = NDArray[np.float64]


@dataclass(frozen=True)
class RankStep:
    """One optimizer step of one rank."""

    meta: Mapping[str, Any]
    arrays: Mapping[str, Any]

    @cached_property
    def digests(self) -> tuple[int, ...]:
        """A checksum of each row that came into the model."""
        return tuple(self.arrays["digests"].tolist())

    @property
    def samples(self) -> list[int] | None:
        """Dataset indices of the same rows, where they are known."""
        ids: list[int] | None = self.meta["samples"]
        return ids if ids is not None and len(ids) == len(self.digests) else None

    @cached_property
    def outputs(self) -> dict[str, Rows]:
        """Sum and sum of magnitudes of each row of each module's output, in the order of the calls' ends."""
        ends = np.cumsum([entry["rows"] for entry in self.meta["outputs"]]).tolist()
        parts = np.split(self.arrays["outputs"], ends[:-1]) if ends else []
        return {entry["name"]: part for entry, part in zip(self.meta["outputs"], parts, strict=True)}

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Class of the module of each output."""
        return {entry["name"]: entry["kind"] for entry in self.meta["outputs"]}

    @cached_property
    def row_sizes(self) -> dict[str, int]:
        """Numbers of a row of each output."""
        return {entry["name"]: entry["size"] for entry in self.meta["outputs"]}

    def facts(self, what: str) -> dict[str, dict[str, Any]]:
        """Return digest, shape and the like of each tensor of `grads`, `weights` or `initial`, by name."""
        return {entry["name"]: entry for entry in self.meta[what]}

    def sketches(self, what: str) -> dict[str, Sketch]:
        """Return the sketches of `grads`, `local`, `weights` or `initial`, by name."""
        names = self.meta["local"] if what == "local" else [entry["name"] for entry in self.meta[what]]
        return dict(zip(names, self.arrays[what], strict=True))


Step = Sequence[RankStep]
"""One optimizer step of all ranks, by rank."""


@dataclass(frozen=True)
class RecordedRun:
    """A run that was recorded."""

    label: str
    """What the reader calls it, such as `2 ranks`."""

    steps: Sequence[Step]

    @property
    def replicas(self) -> int | None:
        """Logical replicas that it computed with."""
        return self.steps[-1][0].meta["replicas"] if self.steps else None


def read_run(label: str, folder: Path, ranks: int) -> RecordedRun:
    """Read what the ranks of a run recorded; only steps that all ranks completed count."""
    steps: list[Step] = []
    while all((folder / f"step-{len(steps):06}-rank-{rank}.npz").exists() for rank in range(ranks)):
        steps.append([_read(folder / f"step-{len(steps):06}-rank-{rank}.npz") for rank in range(ranks)])
    return RecordedRun(label, steps)


def _read(path: Path) -> RankStep:
    with np.load(path, allow_pickle=False) as file:
        return RankStep(json.loads(str(file["meta"])), {name: file[name] for name in file.files if name != "meta"})


def readers_of(step: Step) -> Step:
    """Return one rank of each group that reads the same rows, as the ranks of tensor parallel do."""
    return list({rank.meta["reader"]: rank for rank in reversed(step)}.values())[::-1]


def sharded_names(step: Step) -> set[str]:
    """Return the parameters of which each rank has a part, as tensor parallel cuts them."""
    return {name for rank in step for name in rank.meta["sharded"]}


def merge_ranks(step: Step, what: str) -> RankStep:
    """Return the first rank, or with pipeline stages on other ranks one that stands for all of them.

    Parameters that layers shard over ranks are left out: no rank holds them whole.
    """
    sharded = sharded_names(step)
    if not sharded and not step[0].meta["is_split"]:
        return step[0]
    whole: dict[str, tuple[dict[str, Any], Sketch]] = {}
    for rank in step:
        sketches = rank.sketches(what)
        for name, facts in rank.facts(what).items():
            if name not in sharded:
                whole.setdefault(name, (facts, sketches[name]))
    arrays = {**step[0].arrays, what: np.array([values for _, values in whole.values()])}
    return RankStep({**step[0].meta, what: [facts for facts, _ in whole.values()]}, arrays)


def module_order(step: Step) -> dict[str, int]:
    """Return the place of each module in the forward pass, by path."""
    return {name: index for index, name in reversed(list(enumerate(step[0].outputs)))}


def in_forward_order(names: Sequence[str], step: Step) -> list[str]:
    """Return names of parameters and buffers, sorted by when their modules ran."""
    places = module_order(step)
    last = len(places)
    return sorted(names, key=lambda name: places.get(name.rpartition(".")[0], last))
