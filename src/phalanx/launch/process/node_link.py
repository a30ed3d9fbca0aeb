"""`join`: process that connects the launchers of all nodes over a TCPStore: topology exchange, failure reports.

It holds, or joins, a TCPStore at one documented port of the first host. Nothing else of ours listens on the network:
the store is torch's own, as unauthenticated as every store torch opens.

    launcher -> link   {"offer": {...}, "attempt": n}   {"failed": [endings], "attempt": n}
                       {"done": n}   {"bye": true}
                       {"probe": true}   {"observed": {...}, "probe": n}
    link -> launcher   {"waiting": [nodes], "why": text}   {"offers": [...], "attempt": n}
                       {"failures": [...], "attempt": n}   {"all_done": n}
                       {"probe": n}   {"everywhere": [...], "probe": n}
                       {"error": text, "user": bool}   {"bye": true}

Where a job is stalled, a launcher asks for a probe: all of them observe their ranks, and all learn what is seen.

`user` says that the user can correct it. A host that finds one of the others started with other terms says so in the
store, and looks at the hosts that are late: with another list, or another order, they hold a store of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from phalanx.errors import LaunchError
from phalanx.i18n import tr
from phalanx.launch.process import wire
from phalanx.launch.process.store_watch import StoreWatch
from phalanx.launch.request.topology import NodeOffer, check_terms

POLL_S = 0.1
"""How often the store is asked for news."""

BEAT_S = 0.5
LOST_AFTER_S = 6.0
"""Silence after which a host counts as lost. Far above scheduling delays of a busy host: a failure inside it is told at
once, and one of its network breaks the ranks' own connections first."""

REPORT_EVERY_S = 3.0
"""How often missing hosts are named."""

ELSEWHERE_S = 0.3
"""How long a late host may take to answer at the meeting port."""

_REFUSED = "refused"
"""Key under which a host says why the job cannot start."""

BYE_S = 5.0
"""How long the first host keeps the store for the others to read the end of the job."""


class _LinkError(Exception):
    """Ends the link with a sentence for the user."""

    is_users = False
    """Whether the user can correct it."""


class _TermsError(_LinkError):
    """Hosts were started with terms that differ."""

    is_users = True


def join(
    fds: list[int],
    *,
    host: str,
    port: int,
    node_rank: int,
    node_count: int,
    timeout_s: float,
    hosts: list[str],
    names: list[str],
) -> int:
    """Run the link until the launcher says goodbye.

    Args:
        fds: Socket to the launcher; on the first host also the listening socket of the store.
        host: Address of the first host.
        port: Port of the store there.
        node_rank: This host.
        node_count: All hosts.
        timeout_s: Seconds to wait for the others.
        hosts: Address of each host, as far as they are known.
        names: What to call each host in messages.
    """
    launcher = socket.socket(fileno=fds[0])
    try:
        store = _open_store(launcher, fds[1] if len(fds) > 1 else None, host, port, timeout_s)
        _Link(launcher, store, port, node_rank, node_count, timeout_s, hosts, names).run()
    except _LinkError as error:
        wire.send(launcher, {"error": str(error), "user": error.is_users})
        return 1
    except BrokenPipeError:
        return 1  # The launcher is gone, and the fork server is about to end us.
    return 0


def _open_store(launcher: socket.socket, listen_fd: int | None, host: str, port: int, timeout_s: float) -> Any:
    from torch._C._distributed_c10d import TCPStore

    patience = timedelta(seconds=timeout_s)
    if listen_fd is not None:
        return TCPStore(host, port, None, True, timeout=patience, wait_for_workers=False, master_listen_fd=listen_fd)
    _wait_for_port(launcher, host, port, timeout_s)
    return TCPStore(host, port, None, False, timeout=patience)


def _wait_for_port(launcher: socket.socket, host: str, port: int, timeout_s: float) -> None:
    """Try until the first host listens; torch's own client would wait in silence."""
    started = reported_at = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=REPORT_EVERY_S).close()
            return
        except OSError as error:
            why = error.strerror or "no answer"
        now = time.monotonic()
        if now - started > timeout_s:
            endpoint = f"{host}:{port}"
            raise _LinkError(
                tr(
                    "The first host did not answer at {place} within {timeout_s:g} s ({why}). Start the job there "
                    "too, check the address and that the port is open; --timeout changes how long to wait.",
                    place=endpoint,
                    timeout_s=timeout_s,
                    why=why,
                )
            )
        if now - reported_at >= REPORT_EVERY_S:
            reported_at = now
            wire.send(launcher, {"waiting": [f"{host}:{port}"], "why": why})
        time.sleep(POLL_S)


def _decode(value: bytes, key: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _LinkError(
            f"The store of the hosts holds {value[:40]!r} under {key!r}, which no launcher wrote ({error}). Let "
            "nothing else connect to --master-port."
        ) from None


@dataclass
class _Link:
    launcher: socket.socket
    store: Any
    port: int
    node_rank: int
    node_count: int
    timeout_s: float
    hosts: list[str]
    names: list[str]
    _beats: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    _beat_at: float = 0.0
    _attempt: int = -1
    _met: bool = False
    _done: bool = False
    _offered_at: float = 0.0
    _reported_at: float = 0.0
    _reported: int = 0
    _looks: int = 0
    """How many probes of the ranks were asked for, as far as this launcher knows."""

    _probes_shared: int = 0
    """The last probe of which this launcher knows what all hosts saw."""

    _leaving: bool = False

    def run(self) -> None:
        """Carry news both ways until the launcher says goodbye and everyone has read the end."""
        watch = StoreWatch(self._end_cut_off, silence_s=LOST_AFTER_S, look_s=BEAT_S)
        if self.node_rank:  # the first host has the store itself
            watch.start()
        try:
            while not self._leaving:
                if select.select([self.launcher], [], [], POLL_S)[0]:
                    message = wire.receive(self.launcher)
                    if message is None:
                        return
                    self._handle_message(message[0])
                self._beat()
                self._poll_store()
                watch.note_answer()
            self._leave()
        except RuntimeError as error:
            # torch raises plain RuntimeErrors and subclasses of it when the store's host is gone.
            if not self._leaving:
                raise _LinkError(
                    f"The launcher on {self.names[0]} (node 0) is gone: its store no longer answers ({error})."
                ) from error
        wire.send(self.launcher, {"bye": True})

    def _end_cut_off(self) -> None:
        """Say why, and end this process; its main thread still waits for the store."""
        error = (
            f"The launcher on {self.names[0]} (node 0) is gone: its store has not answered for {LOST_AFTER_S:g} s. "
            "Look at that host: it may be down, out of memory, or cut off."
        )
        try:
            wire.send(self.launcher, {"error": error, "user": False})
        finally:
            os._exit(1)

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "offer" in message:
            self._attempt, self._met, self._done, self._reported = message["attempt"], False, False, 0
            self._probes = self._probes_shared = 0
            self._offered_at = self._reported_at = time.monotonic()
            if self._attempt == 0 and self.store.add(f"claim/{self.node_rank}", 1) > 1:
                raise _LinkError(
                    f"Two launchers say they are node {self.node_rank}. Give every host its own --node-rank."
                )
            self._publish("offer", message["offer"])
        elif "failed" in message:
            self._publish("failed", message["failed"])
            self.store.add(f"{self._attempt}/failures", 1)
        elif "observed" in message:
            self._publish(f"probe/{message['probe']}", message["observed"])
        elif "probe" in message:
            self.store.add(f"{self._attempt}/probes", 1)
        elif "done" in message:
            self._done = True
            self._publish("done", True)
        elif "bye" in message:
            self._leaving = True

    def _publish(self, what: str, value: Any) -> None:
        self.store.set(f"{self._attempt}/{what}/{self.node_rank}", json.dumps(value))

    def _read(self, what: str, node: int) -> Any:
        key = f"{self._attempt}/{what}/{node}"
        return _decode(self.store.get(key), key) if self.store.check([key]) else None

    def _poll_store(self) -> None:
        """Tell the launcher what is new in the store."""
        if self._attempt < 0:
            return
        if not self._met:
            self._poll_offers()
            return
        failures = int(self.store.add(f"{self._attempt}/failures", 0))
        if failures > self._reported:
            self._reported = failures
            reports = [self._read("failed", n) for n in range(self.node_count) if n != self.node_rank]
            exits = [e for listed in reports if isinstance(listed, list) for e in listed]
            wire.send(self.launcher, {"failures": exits, "attempt": self._attempt})
        if self._done and all(self._read("done", n) for n in range(self.node_count)):
            self._done = False
            wire.send(self.launcher, {"all_done": self._attempt})
        self._poll_probes()
        self._check_beats()

    def _poll_probes(self) -> None:
        """Pass on that a probe was asked for, and what all hosts saw in it."""
        count = int(self.store.add(f"{self._attempt}/probes", 0))
        if count > self._probes:
            self._probes = count
            wire.send(self.launcher, {"probe": count})
        if self._probes > self._probes_shared:
            seen = [self._read(f"probe/{self._probes}", n) for n in range(self.node_count)]
            if all(seen):
                self._probes_shared = self._probes
                wire.send(self.launcher, {"everywhere": seen, "probe": self._probes})

    def _poll_offers(self) -> None:
        offers = [self._read("offer", n) for n in range(self.node_count)]
        self._compare([offer for offer in offers if offer])
        if all(offers):
            self._met = True
            wire.send(self.launcher, {"offers": offers, "attempt": self._attempt})
            return
        missing = [self.names[n] for n, offer in enumerate(offers) if offer is None]
        now = time.monotonic()
        if now - self._offered_at > self.timeout_s:
            raise _LinkError(
                tr(
                    "{missing} of {total} hosts did not come within {timeout_s:g} s: {names}. Start the job there "
                    "too; --timeout changes how long to wait.",
                    missing=len(missing),
                    total=self.node_count,
                    timeout_s=self.timeout_s,
                    names=", ".join(missing),
                )
            )
        if now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            wire.send(self.launcher, {"waiting": missing, "why": tr("not started yet")})
            self._probe_missing_hosts([n for n, offer in enumerate(offers) if offer is None], offers[self.node_rank])

    def _compare(self, offers: list[dict[str, Any]], elsewhere: Any = None) -> None:
        """End the link on every host when two were started with terms that differ."""
        if self.store.check([_REFUSED]):
            refusal = self.store.get(_REFUSED).decode(errors="replace")
        else:
            try:
                check_terms([NodeOffer.from_json(offer) for offer in offers])
                return
            except LaunchError as error:
                refusal = str(error)
        for store in (self.store, elsewhere):
            if store is not None:
                store.set(_REFUSED, refusal)
        # The others read the same; that this host is gone would be news of less use to them.
        self._leave(within_s=REPORT_EVERY_S / 2)
        raise _TermsError(refusal)

    def _probe_missing_hosts(self, missing: list[int], own: dict[str, Any]) -> None:
        """See whether a late host holds a meeting of its own, having been given another list or another order."""
        reachable = [n for n in missing if n < len(self.hosts) and n != self.node_rank]
        if not reachable:
            return
        node = reachable[int((self._reported_at - self._offered_at) / REPORT_EVERY_S) % len(reachable)]
        with contextlib.suppress(OSError, RuntimeError):  # Nothing listens there, or no store: the host is just late.
            socket.create_connection((self.hosts[node], self.port), timeout=ELSEWHERE_S).close()
            from torch._C._distributed_c10d import TCPStore

            store = TCPStore(self.hosts[node], self.port, None, False, timeout=timedelta(seconds=2))
            if store.check(["0/offer/0"]):
                self._compare([own, _decode(store.get("0/offer/0"), "0/offer/0")], store)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self.store.set(f"beat/{self.node_rank}", str(now))

    def _check_beats(self) -> None:
        for node in range(self.node_count):
            key = f"beat/{node}"
            if node == self.node_rank or self.store.check([f"bye/{node}"]) or not self.store.check([key]):
                continue
            value, now = self.store.get(key), time.monotonic()
            previous = self._beats.get(node)
            if previous is None or previous[0] != value:
                self._beats[node] = (value, now)
            elif now - previous[1] > LOST_AFTER_S:
                raise _LinkError(
                    f"The launcher on {self.names[node]} (node {node}) is gone: no sign of life for "
                    f"{LOST_AFTER_S:g} s. "
                    "Look at that host: it may be down, out of memory, or cut off."
                )

    def _leave(self, within_s: float = BYE_S) -> None:
        """Leave; the first host last, as the store goes with it."""
        self.store.set(f"bye/{self.node_rank}", "1")
        deadline = time.monotonic() + within_s
        while self.node_rank == 0 and time.monotonic() < deadline:
            if self.store.check([f"bye/{n}" for n in range(self.node_count)]):
                return
            time.sleep(POLL_S)
