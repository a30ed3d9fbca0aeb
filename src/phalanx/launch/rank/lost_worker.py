"""`lost_worker`: the worker of torch's data loaders that was lost, behind an error that says only that a pipe broke."""

from __future__ import annotations

import sys
import time

_LOOK_S = 0.2
"""How long a process may take from closing its pipes to its end."""

_PAUSE_S = 0.01


def lost_worker(error: BaseException) -> RuntimeError | None:
    """Return torch's words on a worker that was killed; None if none was, or `error` does not come from that.

    Torch says them where the signal that a child has ended comes in time; else its main process reads on from a pipe
    that nobody writes to.
    """
    if not isinstance(error, (ConnectionError, EOFError)) or "torch.utils.data" not in sys.modules:
        return None
    from torch._C import _error_if_any_worker_fails

    deadline = time.monotonic() + _LOOK_S
    while time.monotonic() < deadline:
        try:
            _error_if_any_worker_fails()
        except RuntimeError as lost:
            return lost.with_traceback(None)
        time.sleep(_PAUSE_S)
    return None
