"""`SharedWork`: the `Work` handle of an asynchronous collective, and the threads that complete it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.waits.waiting import waits
from phalanx.errors import ConfigError

_PATIENCE_S = 10.0
"""How long the end of a group waits for a callback, which may wait for something else."""


class Carrier(Protocol):
    """What carries operations out: the native group, or `hosts.Between`."""

    def wait(self, operation: Any, timeout_s: float, /) -> None:
        """Wait for the end; raises what ended it."""

    def tend(self, operation: Any, /) -> None:
        """Wait for the end in the background; does not raise."""


class _Thread(threading.local):
    level = 0


_ORDER = (
    " Calls were made in callbacks of futures here, which run when a call ends: in another order among the script's "
    "own calls on each rank. torch's PowerSGD hook does so where a model has several buckets, and runs over NCCL alone "
    "then: give DistributedDataParallel a bucket_cap_mb that holds all gradients, or let px.distribute compress them."
)

_thread = _Thread()
"""How deep in callbacks the code of this thread is: 0 outside of any that a group runs."""


class _Calls:
    in_callbacks = False


_calls = _Calls()
"""Whether a callback of a future made a call in this process."""


class Callbacks:
    """Threads that complete futures, and so run what waits for them, away from the thread that moves the group on.

    A callback may issue operations and wait for their futures, as torch's PowerSGD hook does. Its thread is busy with
    that, so those futures are completed on the thread of the next level. On one thread callbacks run one after the
    other, in the order of the operations.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[tuple[threading.Thread, queue.SimpleQueue[Callable[[], object] | None]]] = []

    def run(self, level: int, act: Callable[[], object]) -> None:
        """Have something done on the thread of a level."""
        while len(self._threads) <= level:
            self._start(len(self._threads))
        self._threads[level][1].put(act)

    def stop(self) -> None:
        """End the threads once they have done what they were given."""
        for thread, acts in self._threads:
            acts.put(None)
            if thread is not threading.current_thread():
                thread.join(_PATIENCE_S)
        self._threads.clear()

    def _start(self, level: int) -> None:
        acts: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._serve, args=(level + 1, acts), name=f"{self._name} callbacks {level}", daemon=True
        )
        self._threads.append((thread, acts))
        thread.start()

    def _serve(self, level: int, acts: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        _thread.level = level
        while (act := acts.get()) is not None:
            act()


class SharedWork(dist.Work):
    """One call of the process group: one operation, or several that belong together.

    Args:
        carrier: What carries the operations out.
        operations: In the order of their issue.
        result: Tensors the caller gets.
        held: Memory the operations use; kept until they are done.
        then: What is left to do once they are, such as copying into a tensor with gaps.
    """

    watches_members = True
    """Whether waiting for it ends when a member of an elastic job is lost."""

    def __init__(
        self,
        carrier: Carrier,
        operations: Sequence[Any],
        result: list[Tensor],
        keep_alive: object,
        then: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        _calls.in_callbacks |= _thread.level > 0
        self._carrier, self.operations, self._result = carrier, operations, result
        self._held, self._then = keep_alive, then
        self._error: Exception | None = None
        self._begun: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._lock = threading.Lock()
        self._is_settled = False
        self._level = 0

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end; the group's timeout holds where none is given.

        Raises:
            PeerLostError: If a rank ended or did not come in time.
            ConfigError: If ranks made different calls.
        """
        if not self._is_settled:
            with waits.waiting():
                self._settle(timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended; the tensors are filled then, those with gaps too."""
        if not self._is_settled and all(operation.is_done for operation in self.operations):
            self._settle()
        return self._is_settled

    def is_success(self) -> bool:
        """Return whether it ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error that ended it, if one did."""
        return self._error if self.is_completed() else None

    def synchronize(self) -> None:
        """Wait: there is no stream to wait on instead."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that were filled."""
        return self._result

    def _source_rank(self) -> int:
        return int(self.operations[-1].peer)

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the tensors that were filled."""
        self.is_completed()  # settles what was done when it was issued, which nobody tends
        with self._lock:
            if self._future is None:
                # The error is raised in a callback because torch's C++ sees no other error that Python sets.
                self._level = _thread.level
                self._begun = torch.futures.Future()
                self._future = self._begun.then(self._outcome)
                if self._is_settled:
                    self._begun.set_result(None)
            return self._future

    def tend(self, callbacks: Callbacks) -> None:
        """Bring it to its end from a thread that has nothing else to do; what waits for its future runs elsewhere."""
        for operation in self.operations:
            self._carrier.tend(operation)
        begun = self._end()
        if begun is not None:
            callbacks.run(self._level, partial(begun.set_result, None))

    def _outcome(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def _settle(self, timeout_s: float = 0.0) -> None:
        begun = self._end(timeout_s)
        if begun is not None:
            begun.set_result(None)

    def _end(self, timeout_s: float = 0.0) -> torch.futures.Future[None] | None:
        """Wait, and finish; return the future that is to be completed then, if there is one."""
        error: Exception | None = None
        try:
            for operation in self.operations:
                self._carrier.wait(operation, timeout_s)
        except ConfigError as found:
            error = ConfigError(f"{found}{_ORDER}") if _calls.in_callbacks else found
        except Exception as found:  # noqa: BLE001 -- kept for whoever asks
            error = found
        with self._lock:
            if self._is_settled:
                return None
            self._error = error or self._finished()
            self._held = self._then = None
            self._is_settled = True
            return self._begun

    def _finished(self) -> Exception | None:
        """Do what is left to do; return the error that ended it, if one did."""
        try:
            if self._then is not None:
                self._then()
        except Exception as error:  # noqa: BLE001 -- kept for whoever asks
            return error
        return None


class CompletionThread:
    """Brings asynchronous works to their end in the order of their issue, on a thread that starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: queue.SimpleQueue[SharedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._callbacks = Callbacks(name)

    def keep(self, work: SharedWork) -> None:
        """Hold a work, and with it its tensors, until it is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._works.put(work)

    def stop(self, within_s: float | None = None) -> None:
        """End the thread once the works it holds are done, which is waited for at most `within_s`."""
        if self._thread is not None:
            self._works.put(None)
            self._thread.join(within_s)
            is_ended, self._thread = not self._thread.is_alive(), None
            if not is_ended:
                return
        self._callbacks.stop()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.tend(self._callbacks)
