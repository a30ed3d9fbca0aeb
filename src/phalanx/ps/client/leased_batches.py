"""`LeasedBatches`: asks server 0 for the batches of a loader, where workers come and go."""

from __future__ import annotations

import logging

from phalanx.errors import InternalError
from phalanx.ps.client.table_client import TableClient
from phalanx.ps.stores.remote import RemoteStore

logger = logging.getLogger("phalanx.ps")


class LeasedBatches:
    """This worker's way to the batches.

    Args:
        client: This process's part in training tables.
        worker: Number of this worker.
    """

    def __init__(self, client: TableClient, worker: int) -> None:
        self._client, self._worker = client, worker
        self._places: set[tuple[int, int]] = set()
        self._loaders = 0

    def number_loader(self) -> int:
        """Return the number of another loader: scripts use their loaders in the same order."""
        self._loaders += 1
        return self._loaders - 1

    def lease(self, loader: int, epoch: int, total: int, count: int, *, is_begun: bool) -> list[tuple[int, int]]:
        """Return the next batches of an epoch as (epoch, number): of an earlier one where a lost worker left some.

        Args:
            loader: Its number.
            epoch: Which epoch.
            total: Batches of it, over all workers.
            count: Most batches to return.
            is_begun: Whether they are computed on next, before this worker pushes again.

        Raises:
            ConfigError: If another worker cut the epoch into another number of batches.
            SystemExit: If this worker was asked to leave.
        """
        self._client.leave_if_asked()
        batches, left = self._store.lease_batches(
            loader, epoch, total, count, step=self._client.mode.pushes if is_begun else None
        )
        if (loader, epoch) not in self._places:
            self._places.add((loader, epoch))
            logger.info(
                "worker %d takes its batches of epoch %d from server 0: %d of %d were left",
                self._worker, epoch, left + sum(e == epoch for e, _ in batches), total,
            )  # fmt: skip
        return batches

    def begin(self, loader: int, epoch: int, number: int) -> None:
        """Say that a batch is computed on next, before this worker pushes again; waits for nothing."""
        self._store.begin_batch(loader, epoch, number, step=self._client.mode.pushes)

    @property
    def _store(self) -> RemoteStore:
        store = self._client.mode.store
        if not isinstance(store, RemoteStore):
            raise InternalError("batches are leased by servers, and this job has none")
        return store
