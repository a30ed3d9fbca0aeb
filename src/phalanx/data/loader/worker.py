"""What a data worker does first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]


class WorkerStart:
    """Lets a worker die with the process that trains, then calls the user's `worker_init_fn`.

    torch's workers look for their parent only between two batches: one whose generator waits would stay for ever.

    Args:
        then: The user's function of the worker's number, if any.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then
        # The kernel's signal comes when the *thread* that forked ends, so it is only asked for where that one lasts.
        is_main = threading.current_thread() is threading.main_thread()
        self.parent = os.getpid() if is_main else 0

    def __call__(self, worker: int) -> None:
        """Start worker number `worker` of this process."""
        # Another parent: a fork server's child, or the training died already, which torch notices at the next batch.
        if os.getppid() == self.parent:
            _prctl_pr_set_pdeathsig(signal.SIGKILL)
            if os.getppid() != self.parent:
                os.kill(os.getpid(), signal.SIGKILL)
        if self.then is not None:
            self.then(worker)
