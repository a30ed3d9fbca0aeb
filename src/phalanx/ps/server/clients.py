"""`ClientStates`: per-client state of a server: last request (for exactly-once), keys of open pulls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import ConfigError
from phalanx.ps.stores.base import Keys

REMEMBERED_PULLS = 16
"""Pulls per client whose keys are remembered; an older one's push must bring its keys."""


class ClientState:
    """One worker's process."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.last = 0
        """Number of the last request that changed something here."""

        self.reply: dict[str, Any] = {}
        """What it was answered."""

        self.owes_keys = False
        """Whether it was asked to send a push again, so that the pushes behind that one come too early."""

        self.pulled_keys: dict[int, dict[str, Keys]] = {}
        """Keys by pull and table."""

    def remember(self, pull: int, keys: dict[str, Keys]) -> None:
        """Remember the keys of a pull; forgets the oldest when there are too many."""
        self.pulled_keys[pull] = keys
        if len(self.pulled_keys) > REMEMBERED_PULLS:
            del self.pulled_keys[next(iter(self.pulled_keys))]

    def remembers(self, changes: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the keys of all pulls that these changes name are remembered."""
        named = [(change["pull"], change["table"]) for change in changes if change.get("pull") is not None]
        return all(table in self.pulled_keys.get(pull, ()) for pull, table in named)

    def forget(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Forget the keys that these changes named."""
        for change in changes:
            if (keys := self.pulled_keys.get(change.get("pull", -1))) is not None:
                keys.pop(change["table"], None)


class ClientStates:
    """The clients of one server by number. A worker's newest process is the one that counts."""

    def __init__(self) -> None:
        self._clients: dict[int, ClientState] = {}
        # Never the number of a pull before a restart, whose keys are gone.
        self._pulls = itertools.count(random.SystemRandom().getrandbits(40) << 12)

    def __getitem__(self, client: int) -> ClientState:
        try:
            return self._clients[client]
        except KeyError:
            raise ConfigError(
                "A request came from a process that declared no tables here, or whose worker was started again since. "
                "A worker declares its tables first; end the older process."
            ) from None

    def get(self, client: int) -> ClientState | None:
        """Return a client that declared tables, or None."""
        return self._clients.get(client)

    def of(self, client: int, worker: int) -> tuple[ClientState, bool]:
        """Return a worker's client, and whether it takes the place of an earlier process of that worker."""
        existing = self._clients.get(client)
        if existing is not None:
            return existing, False
        earlier = [number for number, c in self._clients.items() if c.worker == worker]
        for number in earlier:
            del self._clients[number]
        self._clients[client] = ClientState(worker)
        return self._clients[client], bool(earlier)

    def newest(self, worker: int) -> int:
        """Return the number of a worker's newest process."""
        return next(number for number, client in self._clients.items() if client.worker == worker)

    def next_pull(self) -> int:
        """Return a number for a pull that no pull had before."""
        return next(self._pulls)

    def to_json(self) -> list[dict[str, Any]]:
        """Return what must outlive the process: who did which request last."""
        return [
            {"client": number, "worker": c.worker, "last": c.last, "reply": c.reply}
            for number, c in self._clients.items()
        ]

    def restore(self, value: list[dict[str, Any]]) -> None:
        """Take over what `to_json` returned."""
        for entry in value:
            client = self._clients[entry["client"]] = ClientState(entry["worker"])
            client.last, client.reply = entry["last"], entry["reply"]
