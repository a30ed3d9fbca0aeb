"""`Clocks`: step counts of all workers, and the waits of sync and bounded-staleness training.

Counts only, so that each mode is a rule about counts: no rows, no sockets. Every wait ends when the count comes, when a
worker it depends on is lost, or when the server stops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.errors import ClosedError, ConfigError, PeerLostError
from phalanx.ps.snapshot.save import LEFT
from phalanx.ps.stores.base import ServerMode

WaitReport = Callable[[str, bool], None]

WAIT_REPORT_S = 5.0
"""Seconds between two reports to a waiting worker of whom it waits for."""


def _ignore(waits_for: str, is_connected: bool) -> None:
    """Tell nobody."""


class Clocks:
    """The pushes of each of a job's workers. All methods may be called by any thread.

    A worker is *live* from the start until it leaves; so nobody runs ahead of one that has not come yet.

    Args:
        mode: What a pull waits for; None until the first worker that trains declares it.
        workers: Number of workers of the job.
        bound: Steps a worker may be ahead of the slowest, in mode `bounded`.
    """

    def __init__(self, mode: ServerMode | None, workers: int, bound: int = 0) -> None:
        self.mode = mode
        self.workers = workers
        self.bound = bound
        self._changed = threading.Condition()  # over a lock that a thread may take again
        self._pushed = [0] * workers
        self._live = set(range(workers))
        self._version = 0
        self._connected: set[int] = set()
        self._disconnected_at: dict[int, float] = {}
        self._error: Exception | None = None

    # --- what happened -----------------------------------------------------------------------------------------------

    def set_mode(self, mode: ServerMode, bound: int) -> None:
        """Say what a pull waits for, before the first."""
        with self._changed:
            self.mode, self.bound = mode, bound

    def push(self, worker: int) -> None:
        """Count one more push of a worker."""
        with self._changed:
            self._pushed[worker] += 1
            self._changed.notify_all()

    def apply(self, version: int) -> None:
        """Say that this many steps of mode `sync` are in the tables."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def join(self, worker: int) -> None:
        """Count a worker that had left among the live again; in mode `sync` it goes on with the current step."""
        with self._changed:
            self._disconnected_at.pop(worker, None)
            if worker in self._live:
                return
            self._live.add(worker)
            if self.mode == "sync":
                self._pushed[worker] = max(self._pushed[worker], self._version)
            self._changed.notify_all()

    def leave(self, worker: int) -> None:
        """Take a worker out of every wait: it pushes no more."""
        with self._changed:
            self._live.discard(worker)
            self._disconnected_at.pop(worker, None)
            self._changed.notify_all()

    def disconnect(self, worker: int, now: float) -> None:
        """Note that a live worker's connection closed, at `now` seconds."""
        with self._changed:
            self._connected.discard(worker)
            if worker in self._live:
                self._disconnected_at.setdefault(worker, now)

    def connect(self, worker: int) -> None:
        """Note that a worker's connection is there, or back."""
        with self._changed:
            self._connected.add(worker)
            self._disconnected_at.pop(worker, None)

    def expire(self, now: float, grace_s: float) -> list[int]:
        """Return the workers that went `grace_s` seconds ago without leaving; every wait, now and later, then fails."""
        with self._changed:
            lost = sorted(w for w, since in self._disconnected_at.items() if now - since >= grace_s)
            if lost and self._error is None:
                self._error = PeerLostError(self._lost_message(lost))
                self._changed.notify_all()
            return lost

    def lose_missing(self, waited_s: float, now: float) -> None:
        """Count the `missing` workers as lost, after so many seconds; every wait, now and later, then fails."""
        with self._changed:
            missing = self.missing
            self._disconnected_at |= dict.fromkeys(missing, now)
            if self._error is None:
                self._error = PeerLostError(
                    f"Training needs every worker until it leaves, and {', '.join(f'worker {w}' for w in missing)} did "
                    f"not come in the {waited_s:g} s since the last that came. Read that worker's log for why; if it "
                    "needs longer to come to its first table, set PHALANX_COLLECTIVE_TIMEOUT_S for the servers."
                )
                self._changed.notify_all()

    def stop(self) -> None:
        """End every wait, now and later, because the server stops."""
        with self._changed:
            self._error = self._error or ClosedError("This server is stopping. Start the job again to go on.")
            self._changed.notify_all()

    # --- questions ---------------------------------------------------------------------------------------------------

    def next_step(self, worker: int) -> int:
        """Return the number of the push that a worker makes next."""
        with self._changed:
            return self._pushed[worker]

    @property
    def version(self) -> int:
        """Steps of mode `sync` that are in the tables."""
        with self._changed:
            return self._version

    @property
    def complete(self) -> int:
        """Steps that every live worker has pushed; with no live worker, those that any worker has pushed."""
        with self._changed:
            return min((self._pushed[w] for w in self._live), default=max(self._pushed))

    @property
    def live(self) -> set[int]:
        """Workers that have not left."""
        with self._changed:
            return set(self._live)

    @property
    def steps(self) -> list[int]:
        """Pushes of each worker so far."""
        with self._changed:
            return list(self._pushed)

    @property
    def applied_steps(self) -> list[int]:
        """Pushes of each worker that are in the tables; in mode `sync` those of complete steps."""
        with self._changed:
            return [min(p, self._version) if self.mode == "sync" else p for p in self._pushed]

    @property
    def reached(self) -> list[int]:
        """Pushes of each worker so far; `LEFT` for one that left."""
        with self._changed:
            return [pushed if worker in self._live else LEFT for worker, pushed in enumerate(self._pushed)]

    @property
    def missing(self) -> list[int]:
        """Live workers that never connected since this server started."""
        with self._changed:
            return sorted(self._live - self._connected - self._disconnected_at.keys())

    @property
    def disconnected(self) -> set[int]:
        """Live workers whose connection closed."""
        with self._changed:
            return set(self._disconnected_at)

    # --- waits -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Go on only while no worker is lost and the server runs.

        Raises:
            PeerLostError: If a worker is lost; names it.
            ClosedError: If the server stops.
        """
        with self._changed:
            self._raise_error()

    def wait(self, step: int, report_wait: WaitReport = _ignore) -> None:
        """Wait until the mode lets a worker read the rows that its step `step` computes with. Raises as `check`.

        Args:
            step: The step.
            report_wait: Called every `WAIT_REPORT_S` seconds of waiting with whom for, in words, and whether all of
                them are connected; may raise to give up.
        """
        if self.mode == "sync":
            self._wait_for_all(step, lambda: self._version >= step, report_wait)
        elif self.mode == "bounded":
            self._wait_for_all(step - self.bound, lambda: self.complete >= step - self.bound, report_wait)
        else:
            self.check()

    def wait_turn(self, step: int, report_wait: WaitReport = _ignore) -> None:
        """Wait until a push of this step may be taken: in mode `sync` one step at a time. See `wait`."""
        self._wait_for_all(step, lambda: self.mode != "sync" or self._version >= step, report_wait)

    def wait_steps(self, steps: Sequence[int], seconds: float) -> None:
        """Wait until each worker has `reached` these steps. Raises as `check`, and `PeerLostError` after `seconds`."""

        def behind() -> list[int]:
            return [worker for worker, has in enumerate(self.reached) if has < steps[worker]]

        if not self._wait(lambda: not behind(), seconds):
            raise PeerLostError(
                f"A snapshot waited {seconds:.0f} s for a step of workers {behind()} that another server has. Read "
                "their logs."
            )

    # --- to and from files -------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the counts. Pushes of a step that is not complete are left out: they are written again after it."""
        with self._changed:
            return {
                "mode": self.mode,
                "workers": self.workers,
                "bound": self.bound,
                "pushed": self.applied_steps,
                "live": sorted(self._live),
                "version": self._version,
            }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Clocks:
        """Return clocks with the counts of `to_json`."""
        clocks = cls(value["mode"], value["workers"], value["bound"])
        clocks._pushed = list(value["pushed"])
        clocks._live = set(value["live"])
        clocks._version = value["version"]
        return clocks

    # --- inside ------------------------------------------------------------------------------------------------------

    def _wait_for_all(self, needed: int, is_reached: Callable[[], bool], report_wait: WaitReport) -> None:
        while not self._wait(is_reached, WAIT_REPORT_S):
            with self._changed:
                behind = [worker for worker in sorted(self._live) if self._pushed[worker] < needed]
                disconnected = [worker for worker in behind if worker not in self._connected]
                names = ", ".join(self._name(worker, disconnected) for worker in behind)
            report_wait(names, not disconnected)

    def _name(self, worker: int, disconnected: Sequence[int]) -> str:
        return f"worker {worker} (at step {self._pushed[worker]}{', not connected' if worker in disconnected else ''})"

    def _wait(self, is_reached: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            has_come = self._changed.wait_for(lambda: is_reached() or self._error is not None, seconds)
            self._raise_error()
            return has_come

    def _raise_error(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    def _lost_message(self, lost: list[int]) -> str:
        names = ", ".join(f"worker {w} (at step {self._pushed[w]})" for w in lost)
        return (
            f"Training needs every worker until it leaves, but lost {names}: the connection closed without a `leave`. "
            "Read that worker's log for why; a script ends with fleet.stop_worker()."
        )


def check_worker(worker: object, workers: int) -> int:
    """Return the number of a worker.

    Raises:
        ConfigError: If it is none of this job's.
    """
    if not isinstance(worker, int) or not 0 <= worker < workers:
        raise ConfigError(f"A request came from worker {worker!r}, but this job has workers 0 to {workers - 1}.")
    return worker
