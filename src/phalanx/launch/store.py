"""The job's key-value store, held by a process of its own so that it outlives every rank."""

from __future__ import annotations

import signal
from typing import NoReturn


def serve(listen_fd: int, host: str, port: int) -> NoReturn:
    """Hold torch's TCPStore until the process is told to end.

    Args:
        listen_fd: Listening socket bound to `port`, handed over by the launcher.
        host: Address the ranks reach the store at.
        port: Port of `listen_fd`.
    """
    from torch._C._distributed_c10d import TCPStore

    _store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listen_fd)
    while True:
        signal.pause()
