"""`NodeLinkHandle`: the launcher's client of the node link process."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from typing import Any

from phalanx.errors import LaunchError, PeerLostError
from phalanx.i18n import tr
from phalanx.launch.process import wire
from phalanx.launch.process.node_link import BYE_S, POLL_S
from phalanx.launch.request.topology import NodeOffer

logger = logging.getLogger("phalanx.launch")


class NodeLinkHandle:
    """News from the other hosts, and ours to them."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.all_done = False
        self._offers: dict[int, list[NodeOffer]] = {}
        self._failures: dict[int, list[dict[str, Any]]] = {}
        self._probes: list[dict[str, Any]] = []
        self._left = False

    def offer(self, attempt: int, offer: NodeOffer) -> None:
        """Tell the others what this host brings into an attempt."""
        self.all_done = False
        self._send({"offer": offer.to_json(), "attempt": attempt})

    def offers(self, attempt: int) -> list[NodeOffer] | None:
        """Return what every host brings, by node rank, or None while some are missing."""
        return self._offers.get(attempt)

    def failures(self, attempt: int) -> list[dict[str, Any]]:
        """Return the endings other hosts reported for an attempt that failed there."""
        return self._failures.get(attempt, [])

    def report_failure(self, attempt: int, exits: list[dict[str, Any]]) -> None:
        """Tell the others that this attempt failed here."""
        self._send({"failed": exits, "attempt": attempt})

    def report_done(self, attempt: int) -> None:
        """Tell the others that every worker here ended well."""
        self._send({"done": attempt})

    def request_probe(self) -> None:
        """Have the launchers of all hosts observe their ranks, this one too; may be called from any thread."""
        self._send({"probe": True})

    def publish_probe(self, number: int, observed: dict[str, Any]) -> None:
        """Tell the others what was seen here in a probe; may be called from any thread."""
        self._send({"observed": observed, "probe": number})

    def take_probes(self) -> list[dict[str, Any]]:
        """Return what came since the last call: `probe` asks for one, `everywhere` is what all hosts saw."""
        probes, self._probes = self._probes, []
        return probes

    def _send(self, message: dict[str, Any]) -> None:
        # When the link is gone, `take` raises with the reason it left behind.
        with contextlib.suppress(BrokenPipeError):
            wire.send(self.socket, message)

    def take(self) -> None:
        """Take one message from the link. Blocks.

        Raises:
            PeerLostError: If another host is missing or lost.
            LaunchError: If another host was started with other terms.
        """
        answer = wire.receive(self.socket)
        if answer is None:
            raise PeerLostError(
                "The connection to the other hosts ended by itself; see launcher.link in the log folder."
            )
        message = answer[0]
        if "error" in message:
            raise LaunchError(message["error"]) if message["user"] else PeerLostError(message["error"])
        if "waiting" in message:
            logger.info(tr("server not ready, wait 3 sec to retry..."))
            logger.info(tr("not ready endpoints:{names} ({why})", names=message["waiting"], why=message["why"]))
        elif "offers" in message:
            self._offers[message["attempt"]] = [NodeOffer.from_json(offer) for offer in message["offers"]]
        elif "failures" in message:
            self._failures[message["attempt"]] = message["failures"]
        elif "probe" in message:
            self._probes.append(message)
        elif "all_done" in message:
            self.all_done = True
        elif "bye" in message:
            self._left = True

    def leave(self) -> None:
        """Say goodbye; on the first host this waits until the others have read how the job ended."""
        self._send({"bye": True})
        deadline = time.monotonic() + BYE_S + 10 * POLL_S
        while not self._left and time.monotonic() < deadline:
            if select.select([self.socket], [], [], POLL_S)[0]:
                try:
                    self.take()
                except PeerLostError as error:
                    logger.info("while leaving: %s", error)
                    return
