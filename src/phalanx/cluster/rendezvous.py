"""`meet`: rendezvous over a key-value store: wait for all ranks, name those missing, agree to continue or to give up.

Every rank posts an `Announcement` under its number. The first rank that sees all of them, or whose patience ends,
writes the verdict; the write is atomic and all ranks obey what was
written first: all continue, or all fail alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Protocol

from phalanx.errors import ConfigError, PeerLostError
from phalanx.i18n import tr

SAY_EVERY_S = 3.0
"""Seconds between two lines that say who is missing."""

NAME_EVERY_S = 30.0
"""How often the missing ranks are listed with their ports and logs."""

SLICE_S = 0.5
"""Longest single wait, after which the verdict of another rank is looked for."""

GO = "go"


class RendezvousStore(Protocol):
    """The little a key-value store must do; values are text."""

    def set_once(self, key: str, value: str) -> str:
        """Set `key` unless it is set, and return its value now; atomic."""

    def get(self, key: str) -> str:
        """Return the value of `key`, which must be set."""

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` are set."""

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until all `keys` are set, at most `seconds`; return whether they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """What one rank tells the others about itself."""

    rank: int
    host: str
    pid: int
    log_file: str = ""
    torch: str = ""
    phalanx: str = ""

    def to_json(self) -> str:
        """Return the announcement as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Announcement:
        """Read `to_json` back.

        Raises:
            ConfigError: If it is none; another program may write to the store, which asks for no password.
        """
        try:
            read = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(_foreign(text, error)) from None
        if not all(type(getattr(read, field.name)).__name__ == field.type for field in fields(cls)):
            raise ConfigError(_foreign(text, "fields of other types"))
        return read

    def __str__(self) -> str:
        log = f", log {self.log_file}" if self.log_file else ""
        return f"rank {self.rank} (host {self.host}, pid {self.pid}{log})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What is known beforehand about a rank that has not come."""

    rank: int
    endpoint: str = ""
    log_file: str = ""

    @property
    def name(self) -> str:
        """The endpoint where known, as Fleet lists it, else the rank."""
        return self.endpoint or f"rank {self.rank}"


def meet(
    store: RendezvousStore,
    me: Announcement,
    expected: Sequence[Expected],
    *,
    timeout_s: float,
    clock: Callable[[], float],
    log_line: Callable[[str], None],
    probe: Callable[[str], str],
) -> list[Announcement]:
    """Announce this rank and wait for all others.

    Collective: every rank of `expected` calls it with the same list.

    Args:
        store: Store of this run; keys of earlier runs must not be visible in it.
        me: This rank.
        expected: Every rank of the job by number.
        timeout_s: Seconds to wait.
        clock: Seconds that only grow.
        log_line: Prints one line for the user.
        probe: Says in words whether `host:port` answers.

    Returns:
        All announcements in rank order.

    Raises:
        ConfigError: If two processes claim one rank, or versions differ between ranks.
        PeerLostError: If ranks did not come in time; names them.
    """
    keys = {e.rank: f"here/{e.rank}" for e in expected}
    if (holder := store.set_once(keys[me.rank], me.to_json())) != me.to_json():
        message = _twice(Announcement.from_json(holder), me)
        # After a "go" the others have left; only the extra process can be told.
        raise ConfigError(message) if _is_go(store) else _fail(store, "config", message)
    if not _wait(store, list(keys.values()), expected, timeout_s, clock, log_line, probe):
        missing = [e for e in expected if not store.has([keys[e.rank]])]
        if missing:
            raise _fail(store, "lost", _missing(missing, len(expected), timeout_s, probe))
    if (verdict := store.set_once("verdict", GO)) != GO:
        raise _obey(verdict)
    announcements = [Announcement.from_json(store.get(keys[e.rank])) for e in expected]
    check_versions(announcements)
    return announcements


def _wait(
    store: RendezvousStore,
    keys: Sequence[str],
    expected: Iterable[Expected],
    timeout_s: float,
    clock: Callable[[], float],
    log_line: Callable[[str], None],
    probe: Callable[[str], str],
) -> bool:
    start = clock()
    next_line, next_names = start + SAY_EVERY_S, start + 3 * SAY_EVERY_S
    while not store.wait(keys, max(0.01, min(SLICE_S, start + timeout_s - clock()))):
        if store.has(["verdict"]):
            return False if store.has(keys) else _raise(_obey(store.get("verdict")))
        now = clock()
        if now - start >= timeout_s:
            return False
        if now >= next_line:
            next_line = now + SAY_EVERY_S
            absent = [e for e, key in zip(expected, keys, strict=True) if not store.has([key])]
            log_line(tr("server not ready, wait 3 sec to retry..."))
            log_line(tr("not ready endpoints:{names}", names=[e.name for e in absent]))
            if now >= next_names:
                next_names = now + NAME_EVERY_S
                log_line(tr("still waiting for {names}", names=_describe_missing(absent, probe)))
    return True


def _raise(error: Exception) -> bool:
    raise error


def _fail(store: RendezvousStore, kind: str, message: str) -> Exception:
    return _obey(store.set_once("verdict", json.dumps({"kind": kind, "message": message})))


def _is_go(store: RendezvousStore) -> bool:
    return store.has(["verdict"]) and store.get("verdict") == GO


def _obey(verdict: str) -> Exception:
    if verdict == GO:
        return PeerLostError("This rank came after the others had started without it; start the job again.")
    try:
        failure = json.loads(verdict)
        return (ConfigError if failure["kind"] == "config" else PeerLostError)(failure["message"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return ConfigError(_foreign(verdict, error))


def _foreign(text: str, why: object) -> str:
    return (
        f"The store of this job holds {text[:60]!r}, which no rank of this version wrote ({why}). Run the same version "
        "everywhere, and give each job a store (file, port or job id) of its own."
    )


def _twice(holder: Announcement, me: Announcement) -> str:
    return (
        f"Two processes say they are rank {me.rank}: host {holder.host} pid {holder.pid} and "
        f"host {me.host} pid {me.pid}. "
        "Give each process its own RANK, or, after a killed run, use a new store (file, port or job id)."
    )


def _missing(missing: Sequence[Expected], total: int, timeout_s: float, probe: Callable[[str], str]) -> str:
    names = _describe_missing(missing, probe)
    return tr(
        "Waited {timeout_s:g} s for {total} ranks; {missing} did not come: {names}. Look into their logs for why they "
        "did not start. If they are slow, allow more time: --timeout, or PHALANX_RENDEZVOUS_TIMEOUT_S.",
        timeout_s=timeout_s,
        total=total,
        missing=len(missing),
        names=names,
    )


def _describe_missing(missing: Sequence[Expected], probe: Callable[[str], str]) -> str:
    """Return the ranks with what is known of each: whether its port answers, and its log."""
    parts = []
    for e in missing:
        facts = [probe(e.endpoint)] if e.endpoint else []
        facts += [f"log {e.log_file}"] if e.log_file else []
        parts.append(f"rank {e.rank}" + (f" ({', '.join(facts)})" if facts else ""))
    return "; ".join(parts)


def check_versions(announcements: Sequence[Announcement]) -> None:
    """Check that all ranks run the same torch release and the same Phalanx.

    Raises:
        ConfigError: If they do not; lists which ranks have what.
    """
    for what in ("torch", "phalanx"):
        ranks_by_version: dict[str, list[int]] = {}
        for a in announcements:
            ranks_by_version.setdefault(getattr(a, what), []).append(a.rank)
        if len(ranks_by_version) > 1:
            who = "; ".join(f"{version} on {name_ranks(ranks)}" for version, ranks in ranks_by_version.items())
            raise ConfigError(f"All ranks need the same {what}, found {who}. Install one version everywhere.")


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0, 1, 5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
