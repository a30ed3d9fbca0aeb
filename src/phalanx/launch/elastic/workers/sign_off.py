"""`SignOff`: tells the parameter servers of a job that a worker is gone, beside the launcher's loop."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from phalanx.errors import PhalanxError
from phalanx.ps.wire.client.connection import Connection

CONNECT_S = 60.0
"""Longest wait for a server that is started again meanwhile."""


class SignOff:
    """One worker's leave, in its place. Servers then count it in no step and refuse what its process had still sent.

    Args:
        endpoints: `host:port` of every server.
        secret: The job's secret.
        worker: The worker, whose process has ended.
        workers: Most workers of the job.
    """

    def __init__(self, endpoints: Sequence[str], secret: bytes, worker: int, workers: int) -> None:
        self._endpoints, self._secret = endpoints, secret
        self._about: dict[str, object] = {"mode": None, "bound": 0, "workers": workers, "worker": worker, "specs": []}
        self.problem = ""
        """Why servers may still count the worker, once this is done; empty if all were told."""

        self._thread = threading.Thread(target=self._run, name=f"sign off worker {worker}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all servers have answered, or cannot be told."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        client = secrets.randbits(64)
        connections: list[Connection] = []
        try:
            for rank, endpoint in enumerate(self._endpoints):
                connection = Connection(
                    endpoint,
                    secret=self._secret,
                    me=f"worker {self._about['worker']}",
                    peer=f"server {rank}",
                    connect_s=CONNECT_S,
                    retry_s=CONNECT_S,
                    client=client,
                )
                connections.append(connection)
            for pending in [connection.send("declare", self._about) for connection in connections]:
                pending.result()
            for pending in [connection.send("leave", {}) for connection in connections]:
                pending.result()
        except (PhalanxError, OSError, ValueError, LookupError) as error:
            self.problem = str(error) or repr(error)
        finally:
            for connection in connections:
                connection.close()
