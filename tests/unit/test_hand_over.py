"""`HandOver` with servers that answer as the test says: how a change is given up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launching import wait_until
from phalanx.errors import ConfigError, PeerLostError
from phalanx.launch.job.servers import hand_over
from phalanx.launch.job.servers.hand_over import HandOver, HandOverPhase

STATE: dict[str, Any] = {
    "specs": [],
    "counts": {},
    "clients": [],
    "clocks": {},
    "leases": {},
    "batch_leases": {},
    "days": 0,
    "first_pushes": {},
    "withheld": [],
    "unanswered": 0,
    "saving": {"fulls": {}, "sources": []},
}
REPLIES: dict[str, dict[str, Any]] = {
    "freeze": {"steps": [1], "pushed": [1], "mode": "async", "worker": None},
    "state": {"state": STATE},
    "snapshot": {},
    "saved": {"done": False},
    "fence": {},
    "resume": {},
}


class FakeServers:
    """All servers of a job, in the place of connections to them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.replies = {op: dict(reply) for op, reply in REPLIES.items()}
        self.errors: dict[str, Exception] = {}

    def connect(self, *_: Any, **__: Any) -> FakeServers:
        return self

    def send(self, op: str, _: Mapping[str, Any]) -> Any:
        self.asked.append(op)
        if op in self.errors:
            raise self.errors[op]
        return SimpleNamespace(result=lambda: SimpleNamespace(meta=self.replies[op]))

    def call(self, op: str, meta: Mapping[str, Any]) -> Any:
        return self.send(op, meta).result()

    def close(self) -> None:
        """Nothing."""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> FakeServers:
    fakes = FakeServers()
    monkeypatch.setattr(hand_over, "Connection", fakes.connect)
    return fakes


@pytest.fixture
def begin(servers: FakeServers, tmp_path: Path) -> Callable[[], HandOver]:
    about = {"secret": bytes(32), "job": "job", "workers": 2, "folder": tmp_path / "layout-1"}
    return lambda: HandOver(["here:1"], ["here:2"], **about)


def test_servers_that_write_go_on_at_once_when_the_change_is_given_up(
    servers: FakeServers, begin: Callable[[], HandOver]
) -> None:
    change = begin()
    wait_until(lambda: servers.asked.count("saved") > 1)
    assert change.phase is HandOverPhase.WRITE
    change.give_up("no more")
    wait_until(lambda: "resume" in servers.asked)
    # The folder they write to is deleted when this is over.
    assert not change.is_over
    servers.replies["saved"] = {"done": True, "result": {}}
    wait_until(lambda: change.is_over)


def test_a_server_that_is_not_reached_is_asked_to_go_on_until_it_answers(
    servers: FakeServers, begin: Callable[[], HandOver]
) -> None:
    servers.errors = {"state": ConfigError("broken"), "resume": PeerLostError("silent")}
    change = begin()
    change.give_up("no more")
    wait_until(lambda: servers.asked.count("resume") > 2)
    assert not change.is_over
    servers.errors.clear()
    wait_until(lambda: change.is_over)


SAVING = ConfigError("Asked for a snapshot while another begins. Save from one worker at a time")


def test_a_snapshot_that_holds_a_change_up_is_named_as_such(
    servers: FakeServers, begin: Callable[[], HandOver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "PATIENCE_S", 0.0)
    servers.errors = {"freeze": SAVING}
    change = begin()
    wait_until(lambda: change.is_over)
    assert "no common moment within 0 s: a snapshot is being saved. Ask again" in change.failure


def test_a_worker_that_is_lost_while_nothing_is_held_back_is_not_fenced(
    servers: FakeServers, begin: Callable[[], HandOver]
) -> None:
    servers.errors = {"freeze": SAVING}
    change = begin()
    wait_until(lambda: "freeze" in servers.asked)
    change.give_up("worker 0 ended", 0)
    wait_until(lambda: change.is_over)
    assert "fence" not in servers.asked
