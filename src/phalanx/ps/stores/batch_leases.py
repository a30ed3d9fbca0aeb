"""`BatchLeases`: lease the batches of an epoch to workers that come and go; those of a lost one are leased again.

A batch is done once the push that it is in was applied. So a worker tells, as it begins a batch, how many pushes it had
made; what the count of its pushes says when it is lost is then exact, whatever it had sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.errors import ConfigError

_KEPT = 2
"""Epochs of a loader whose count is kept: of an older one everything was leased, or nobody comes back to it."""

MOST_AT_ONCE = 4096
"""Batches that a worker may ask for in one request."""


class LeasedBatch(NamedTuple):
    """One batch."""

    loader: int
    """Which of the script's loaders, by the order of their first use."""

    epoch: int
    number: int


@dataclass(slots=True)
class _Lease:
    """A batch that a worker has."""

    batch: LeasedBatch
    push: int | None
    """The push that it is in; None until the worker begins it."""


class BatchLeases:
    """The batches of each epoch of each loader, by number. Kept by server 0; one thread at a time."""

    def __init__(self) -> None:
        self._epochs: dict[tuple[int, int], list[int]] = {}
        """Number of batches and of those leased, by loader and epoch."""

        self._returned: list[LeasedBatch] = []
        self._leased: dict[int, list[_Lease]] = {}

    @property
    def returned(self) -> list[LeasedBatch]:
        """Batches of lost workers that nobody took yet."""
        return sorted(self._returned)

    def check(self, loader: object, epoch: object, total: object, count: object) -> None:
        """Check a request for batches.

        Raises:
            ConfigError: If it is none, or an epoch began with another number of batches.
        """
        if not all(map(is_count, (loader, epoch, total, count))) or count not in range(1, MOST_AT_ONCE + 1):
            raise ConfigError(
                f"A worker asked for {count!r} of {total!r} batches of epoch {epoch!r} of loader {loader!r}. Run the "
                "same version of phalanx everywhere."
            )
        before = next((p for of_epoch, p in self._epochs.items() if of_epoch == (loader, epoch)), None)
        if before is not None and before[0] != total:
            raise ConfigError(
                f"A worker cuts epoch {epoch} into {total} batches, and another one into {before[0]}. Give every "
                "worker the same data and batch size."
            )

    def lease(
        self, worker: int, loader: int, epoch: int, total: int, count: int, *, pushed: int, push: int | None
    ) -> dict[str, Any]:
        """Give a worker its next batches of an epoch; those that came back from lost workers first.

        Args:
            worker: Who asks.
            loader: Which loader.
            epoch: Which epoch.
            total: Batches of it.
            count: Most batches to give.
            pushed: Pushes of the worker that were applied.
            push: Number of the push that the batches will be in, where they are begun at once.

        Returns:
            `batches`, as pairs of epoch and number, none when the epoch is leased; and how many are `left` of it.
        """
        self._forget_done(worker, pushed)
        progress = self._progress(loader, epoch, total)
        again = [batch for batch in self.returned if batch.loader == loader and batch.epoch <= epoch][:count]
        self._returned = [batch for batch in self._returned if batch not in again]
        fresh = range(progress[1], min(progress[0], progress[1] + count - len(again)))
        progress[1] += len(fresh)
        batches = again + [LeasedBatch(loader, epoch, number) for number in fresh]
        self._leased.setdefault(worker, []).extend(_Lease(batch, push) for batch in batches)
        left = progress[0] - progress[1] + sum(batch[:2] == (loader, epoch) for batch in self._returned)
        return {"batches": [[batch.epoch, batch.number] for batch in batches], "left": left}

    def _progress(self, loader: int, epoch: int, total: int) -> list[int]:
        """Return batches and leased batches of an epoch, to be changed; of one that is long over there are none."""
        latest = max((e for of_loader, e in self._epochs if of_loader == loader), default=epoch)
        if epoch <= latest - _KEPT:
            return [0, 0]
        progress = self._epochs.setdefault((loader, epoch), [total, 0])
        for of_loader, e in [*self._epochs]:
            if of_loader == loader and e <= epoch - _KEPT:
                del self._epochs[of_loader, e]
        return progress

    def begin(self, worker: int, batch: LeasedBatch, push: int) -> None:
        """Note in which push a batch will be that a worker begins; nothing if the worker has it not."""
        for lease in self._leased.get(worker, ()):
            if lease.batch == batch:
                lease.push = push

    def release(self, worker: int, pushed: int) -> list[LeasedBatch]:
        """Let others have the batches of a worker that left or is lost; returns those that it did not push."""
        self._forget_done(worker, pushed)
        undone = [lease.batch for lease in self._leased.pop(worker, ())]
        self._returned += undone
        return undone

    def _forget_done(self, worker: int, pushed: int) -> None:
        if worker in self._leased:
            self._leased[worker] = [e for e in self._leased[worker] if e.push is None or e.push >= pushed]

    def to_json(self) -> dict[str, Any]:
        """Return all progress."""
        return {
            "epochs": [[*of_epoch, *progress] for of_epoch, progress in self._epochs.items()],
            "returned": [list(batch) for batch in self._returned],
            "leased": {str(worker): [[*e.batch, e.push] for e in leased] for worker, leased in self._leased.items()},
        }

    def restore(self, value: Mapping[str, Any]) -> None:
        """Take over what `to_json` returned."""
        self._epochs = {(loader, epoch): [total, leased] for loader, epoch, total, leased in value["epochs"]}
        self._returned = [LeasedBatch(*batch) for batch in value["returned"]]
        self._leased = {
            int(worker): [_Lease(LeasedBatch(*batch), push) for *batch, push in leased]
            for worker, leased in value["leased"].items()
        }


def is_count(value: object) -> bool:
    """Return whether a value that a worker sent counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
