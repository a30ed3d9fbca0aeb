"""`ClientStates`: which worker each client of a server is, and the last request of each, for exactly-once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from phalanx._core import ServerEngine
from phalanx.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClientState:
    """One worker's process."""

    worker: int
    last: int
    """Number of the last request that changed something here."""

    reply: str
    """What it was answered, as JSON."""

    dropped: int | None
    """Of a push the gradients that no row took."""


class ClientStates:
    """The clients of one server by number, as its engine keeps them. A worker's newest process is the one that counts.

    Args:
        engine: Takes pulls and pushes of these clients.
    """

    def __init__(self, engine: ServerEngine) -> None:
        self._engine = engine

    def worker_of(self, client: int) -> int:
        """Return a client's worker.

        Raises:
            ConfigError: If that process declared no tables, or its worker was started again since.
        """
        worker = self._engine.worker_of(client)
        if worker is None:
            raise ConfigError(
                "A request came from a process that declared no tables here, or whose worker was started again since. "
                "A worker declares its tables first; end the older process."
            )
        return worker

    def get(self, client: int) -> ClientState | None:
        """Return a client that declared tables, or None."""
        return self._all().get(client)

    def to_json(self) -> list[dict[str, Any]]:
        """Return what must outlive the process: who did which request last."""
        return [
            {"client": number, "worker": c.worker, "last": c.last, "reply": json.loads(c.reply)}
            for number, c in self._all().items()
        ]

    def restore(self, value: list[dict[str, Any]]) -> None:
        """Take over what `to_json` returned."""
        for entry in value:
            reply = entry["reply"]
            self._engine.restore_client(
                entry["client"], entry["worker"], entry["last"], json.dumps(reply), reply.get("dropped")
            )

    def _all(self) -> dict[int, ClientState]:
        return {
            number: ClientState(worker, last, reply, dropped)
            for number, worker, last, reply, dropped in self._engine.clients()
        }
