"""`Flight`: what all ranks of a run logged of its updates, attempts put together."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.parallel.observe.flight_log import flight_file, read_flight_log

_BEFORE = 50
"""Updates whose losses tell what is usual."""

_SPIKE = 10.0
"""Multiple of the usual deviation of the loss from its median that counts as a spike."""


@dataclass(slots=True)
class Flight:
    """The updates of a run, by number."""

    script: list[str]
    folder: str
    """Where the script ran."""

    replicas: int | None = None
    threads: int | None = None
    names: list[list[str]] = field(default_factory=list)
    """First and last parameter of each bucket."""

    groups: list[list[str]] = field(default_factory=list)
    updates: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """Entries by update and rank; of several attempts the last."""

    checkpoints: dict[int, str] = field(default_factory=dict)
    """By the number of updates in them."""

    @property
    def last(self) -> int:
        """The last update that was logged."""
        return max(self.updates)

    def losses(self) -> dict[int, float]:
        """Return the mean loss of each update over all that was logged."""
        values = {step: [float(x) for e in ranks.values() for x in e["loss"]] for step, ranks in self.updates.items()}
        return {step: statistics.fmean(losses) for step, losses in sorted(values.items()) if losses}

    def nearest_checkpoint(self, step: int) -> tuple[int, str | None]:
        """Return the updates and the folder of the last checkpoint before an update that still exists."""
        usable = [n for n, path in self.checkpoints.items() if n <= step and Path(path).is_dir()]
        return (max(usable), self.checkpoints[max(usable)]) if usable else (0, None)

    def find_nan(self) -> int | None:
        """Return the first update with a loss that is not finite."""
        return next((step for step, loss in self.losses().items() if not abs(loss) < float("inf")), None)

    def find_spike(self) -> int | None:
        """Return the first update whose loss is far above those before it."""
        usual: list[float] = []
        for step, loss in self.losses().items():
            if len(usual) >= 5:
                median = statistics.median(usual)
                deviation = statistics.median(abs(value - median) for value in usual)
                if not loss <= median + _SPIKE * max(deviation, 0.01 * abs(median)):
                    return step
            usual = [*usual, loss][-_BEFORE:]
        return None


def read_flight(folder: Path) -> Flight:
    """Read the flight logs in a job's log folder, of all attempts.

    Raises:
        ConfigError: If there are none.
    """
    flight: Flight | None = None
    attempts = sorted(folder.glob("attempt-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for attempt in (*attempts, folder):
        rank = 0
        while (entries := read_flight_log(flight_file(attempt, rank))) or rank == 0:
            for entry in entries:
                if entry["kind"] == "begin" and flight is None:
                    flight = Flight(entry["script"], entry["folder"])
                elif flight is not None:
                    _add(flight, rank, entry)
            rank += 1
    if flight is None or not flight.updates:
        raise ConfigError(
            f"{folder} has no flight log (flight.0.jsonl). Give the log folder of a run that was started with "
            "phalanx run --flight-log and made a step."
        )
    return flight


def _add(flight: Flight, rank: int, entry: dict[str, Any]) -> None:
    kind = entry["kind"]
    if kind == "step":
        flight.updates.setdefault(entry["step"], {})[rank] = entry
    elif kind in ("saved", "loaded"):
        flight.checkpoints[entry["step"]] = entry["path"]
    elif kind == "buckets":
        flight.names, flight.groups = entry["names"], entry["groups"]
        flight.replicas, flight.threads = entry["replicas"], entry["threads"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a replay first differs from the run."""

    step: int
    what: str
    """gradients of a replica, their sum, or the samples."""

    replica: int | None = None
    rank: int | None = None
    """The rank that held the replica in the run."""

    bucket: tuple[str, str] | None = None
    """First and last parameter of the bucket."""

    def text(self) -> str:
        """Return it in words."""
        where = "" if self.bucket is None else f" of the bucket {self.bucket[0]} to {self.bucket[1]}"
        whom = "" if self.replica is None else f" of replica {self.replica}, computed by rank {self.rank}"
        return f"step {self.step}: the {self.what}{where}{whom} had other bits in the run"


def first_mismatch(run: Flight, replay: Flight) -> Mismatch | None:
    """Return the first difference of digests between a run and its replay."""
    for step in sorted(run.updates.keys() & replay.updates.keys()):
        again = next(iter(replay.updates[step].values()))
        ranks = run.updates[step]
        for rank, entry in ranks.items():
            for name in ("epoch", "position", "seed"):
                if entry.get(name) != again.get(name):
                    return Mismatch(step, f"{name} of the loader ({entry.get(name)}, now {again.get(name)})", rank=rank)
            for replica, digests in entry["local"].items():
                now = again["local"].get(replica, digests)
                index = next((i for i, (a, b) in enumerate(zip(digests, now, strict=False)) if a != b), None)
                if index is not None:
                    return Mismatch(step, "gradients", int(replica), rank, _bucket(run.names, index))
        for rank, entry in ranks.items():
            sums = enumerate(zip(entry["sum"], again["sum"], strict=False))
            index = next((i for i, (a, b) in sums if a != b), None)
            if index is not None:
                return Mismatch(step, f"sum of gradients on rank {rank}", bucket=_bucket(run.groups, index))
    return None


def _bucket(names: list[list[str]], index: int) -> tuple[str, str] | None:
    if index >= len(names) or not names[index]:
        return None
    return names[index][0], names[index][-1]
