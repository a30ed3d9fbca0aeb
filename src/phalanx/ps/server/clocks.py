"""`Clocks`: step counts of all workers, and the waits of sync and bounded-staleness training.

The native clocks (`csrc/server_clocks.h`) count and wait: no rows, no sockets. Every wait ends when the count comes,
when a worker it depends on is lost, or when the server stops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phalanx._core import ServerClocks
from phalanx.errors import ConfigError, PeerLostError
from phalanx.ps.snapshot.moment import LEFT
from phalanx.ps.stores.base import ServerMode

WaitReport = Callable[[str, bool], None]

WAIT_REPORT_S = 5.0
"""Seconds between two reports to a waiting worker of whom it waits for."""


MOST_WORKERS = 1 << 20


def ignore_wait(waits_for: str, is_connected: bool) -> None:
    """Tell nobody."""


class Clocks(ServerClocks):
    """The pushes of each of a job's workers. All methods may be called by any thread.

    A worker is *live* from the start until it leaves; so nobody runs ahead of one that has not come yet.

    Args:
        mode: What a pull waits for; None until the first worker that trains declares it.
        workers: Number of workers of the job.
        bound: Steps a worker may be ahead of the slowest, in mode `bounded`.
        pushed: Pushes of each worker so far; none when empty.
        live: Workers that have not left; all when None.
        version: Steps of mode `sync` that are in the tables.
    """

    def __init__(
        self,
        mode: ServerMode | None,
        workers: int,
        bound: int = 0,
        *,
        pushed: Sequence[int] = (),
        live: Sequence[int] | None = None,
        version: int = 0,
    ) -> None:
        check_workers(workers)
        self.workers, self.bound = workers, bound
        steps = list(pushed) or [0] * workers
        if len(steps) != workers:
            raise ValueError(f"{len(steps)} counts for {workers} workers")
        is_live = [live is None or worker in live for worker in range(workers)]
        super().__init__((mode, bound, version, steps, is_live), WAIT_REPORT_S)

    def set_mode(self, mode: ServerMode, bound: int) -> None:
        """Say what a pull waits for, before the first."""
        self.bound = bound
        self._set_mode(mode, bound)

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def mode(self) -> ServerMode | None:
        """What a pull waits for."""
        return self.counts()[0]  # type: ignore[return-value]

    @property
    def version(self) -> int:
        """Steps of mode `sync` that are in the tables."""
        return self.counts()[2]

    @property
    def live(self) -> set[int]:
        """Workers that have not left."""
        return {worker for worker, is_live in enumerate(self.counts()[4]) if is_live}

    @property
    def steps(self) -> list[int]:
        """Pushes of each worker so far."""
        return self.counts()[3]

    @property
    def applied_steps(self) -> list[int]:
        """Pushes of each worker that are in the tables; in mode `sync` those of complete steps."""
        mode, _, version, pushed, _ = self.counts()
        return [min(p, version) if mode == "sync" else p for p in pushed]

    @property
    def reached(self) -> list[int]:
        """Pushes of each worker so far; `LEFT` for one that left."""
        _, _, _, steps, live = self.counts()
        return [pushed if is_live else LEFT for pushed, is_live in zip(steps, live, strict=True)]

    @property
    def disconnected(self) -> set[int]:
        """Live workers whose connection closed."""
        return set(self._disconnected())

    # --- waits -------------------------------------------------------------------------------------------------------

    def wait(self, step: int, report_wait: WaitReport = ignore_wait) -> None:
        """Wait until the mode lets a worker read the rows that its step `step` computes with. Raises as `check`.

        Args:
            step: The step.
            report_wait: Called every `WAIT_REPORT_S` seconds of waiting with whom for, in words, and whether all of
                them are connected; may raise to give up.
        """
        self._wait(step, report_wait)

    def wait_steps(self, steps: Sequence[int], seconds: float) -> None:
        """Wait until each worker has `reached` these steps. Raises as `check`, and `PeerLostError` after `seconds`."""
        if behind := self._wait_steps(list(steps), seconds):
            raise PeerLostError(
                f"A snapshot waited {seconds:.0f} s for a step of workers {behind} that another server has. Read "
                "their logs."
            )

    # --- to and from files -------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the counts. Pushes of a step that is not complete are left out: they are written again after it."""
        mode, bound, version, _, _ = self.counts()
        return {
            "mode": mode,
            "workers": self.workers,
            "bound": bound,
            "pushed": self.applied_steps,
            "live": sorted(self.live),
            "version": version,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Clocks:
        """Return clocks with the counts of `to_json`."""
        return cls(
            value["mode"],
            value["workers"],
            value["bound"],
            pushed=value["pushed"],
            live=value["live"],
            version=value["version"],
        )


def check_workers(workers: int) -> None:
    """Check the number of workers of a job.

    Raises:
        ConfigError: If no job has so many.
    """
    if not 0 <= workers <= MOST_WORKERS:
        raise ConfigError(f"A job of {workers} workers was declared. Give 1 to {MOST_WORKERS}.")


def check_worker(worker: object, workers: int) -> int:
    """Return the number of a worker.

    Raises:
        ConfigError: If it is none of this job's.
    """
    check_workers(workers)
    if not isinstance(worker, int) or not 0 <= worker < workers:
        raise ConfigError(f"A request came from worker {worker!r}, but this job has workers 0 to {workers - 1}.")
    return worker
