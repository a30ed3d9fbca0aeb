"""`FakeLauncher`: runs a function on real ranks of an elastic job; views, fencing and joiners come from the test.

    job = FakeLauncher(train, members=3, env={"PHALANX_REPLICAS": "4"})
    values = job.run()          # what each member returned, by member id; lost members are missing

Members end themselves where a test wants it: `os.kill(os.getpid(), signal.SIGKILL)` is as real from inside.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import ranks


@dataclass
class Member:
    """One process of the job, and this side of its connection."""

    id: str
    rank: ranks.Rank
    socket: socket.socket
    is_member: bool
    is_leaving: bool = False
    received: bytes = b""
    is_over: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)


class FakeLauncher:
    """See the module."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        members: int,
        env: Mapping[str, str | None] | None = None,
        replaces: bool = False,
        hosts: int = 1,
        timeout_s: float = 40.0,
    ) -> None:
        self._fn, self._args, self._timeout_s = fn, args, timeout_s
        self._env = dict(env or {})
        self._first, self._replaces, self._hosts = members, replaces, hosts
        self._epoch = 0
        self._reason = ""
        self.members: dict[str, Member] = {}
        self.views: list[dict[str, Any]] = []
        self.outputs: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        """Run to the end; return what each member returned, by id."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory(prefix="phalanx-elastic-") as folder:
            self._folder = Path(folder)
            try:
                for rank in range(self._first):
                    self._start(rank, self._first, is_joining=False)
                self._send_view(planned=False, reason="start")
                self._serve(time.monotonic() + self._timeout_s)
            finally:
                ranks.end_ranks([member.rank for member in self.members.values()])
                for member in self.members.values():
                    member.socket.close()
                self.outputs = {id: member.rank.outcome.output for id, member in self.members.items()}
        failed = [
            m
            for m in self.members.values()
            if m.rank.outcome.failed and m.rank.outcome.error_type not in ("Killed", "SystemExit")
        ]
        if failed:
            raise ranks.RankFailedError(ranks.describe_outcomes([m.rank.outcome for m in self.members.values()]))
        return {id: m.rank.outcome.value for id, m in self.members.items() if not m.rank.outcome.failed}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return what members told the launcher."""
        return [message[kind] for member in self.members.values() for message in member.messages if kind in message]

    def _start(self, rank: int, size: int, *, is_joining: bool) -> None:
        id = f"n0.{len(self.members)}"
        ours, theirs = socket.socketpair()
        env = ranks.rank_environment(rank, size, self._store.port, self._folder) | self._env
        env["PHALANX_MEMBER_ID"] = id
        if self._hosts > 1:
            env["PHALANX_HOST_ID"] = f"host {len(self.members) % self._hosts}"
        started = ranks.start_rank(
            _member_main, (theirs, self._fn, self._args), len(self.members), env, self._folder, self._timeout_s
        )
        theirs.close()
        self.members[id] = Member(id, started, ours, is_member=not is_joining)
        if is_joining:
            self._send(self.members[id], {"joining": {"epoch": self._epoch, "id": id}})

    def _serve(self, deadline: float) -> None:
        while waiting := [m for m in self.members.values() if not m.is_over]:
            if time.monotonic() > deadline:
                for member in waiting:
                    member.rank.outcome.error_type, member.rank.outcome.message = "Timeout", "still running"
                    member.rank.is_done = True
                return
            ready = wait([m.socket for m in waiting] + [m.rank.pipe for m in waiting], 0.2)
            for member in waiting:
                if member.socket in ready:
                    self._take(member)
                if member.rank.pipe in ready:
                    ranks.receive_reply(member.rank)
                    member.is_over = True
                    self._ended(member)

    def _ended(self, member: Member) -> None:
        was_member, member.is_member = member.is_member or member.is_leaving, False
        if was_member and member.rank.outcome.failed and member.rank.outcome.error_type != "SystemExit":
            self._send_view(planned=False, reason=f"{member.id} ended: {member.rank.outcome.error_type}")
            if self._replaces:
                self._start(0, 1, is_joining=True)

    def _take(self, member: Member) -> None:
        try:
            data = member.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        member.received += data
        *lines, member.received = member.received.split(b"\n")
        for line in lines:
            message = json.loads(line)
            member.messages.append(message)
            if "ready" in message:
                member.is_member = True
                self._send_view(planned=True, reason=f"{member.id} joins")
            elif "suspect" in message:
                for id in message["suspect"]["ids"]:
                    self._judge(member, self.members[id])
            elif "spawn" in message:
                self._start(0, 1, is_joining=True)
            elif "leave" in message:
                member.is_member, member.is_leaving = False, True
                self._send_view(planned=True, reason=f"{member.id} leaves", to=member)

    def _judge(self, asker: Member, suspect: Member) -> None:
        if suspect.is_over:  # it ended well, and others wait for it
            if not suspect.is_member and suspect.id in [member["id"] for member in self.views[-1]["members"]]:
                self._send_view(planned=False, reason=f"{suspect.id} has finished")
            return
        pid = suspect.rank.process.pid
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            os.kill(pid or 0, signal.SIGKILL)
        else:
            self._send(asker, {"wait": {"id": suspect.id, "why": f"state {state}"}})

    def _send_view(self, *, planned: bool, reason: str, to: Member | None = None) -> None:
        current = [m for m in self.members.values() if m.is_member]
        if self.views:
            order = [member["id"] for member in self.views[-1]["members"]]
            current.sort(key=lambda m: order.index(m.id) if m.id in order else len(order))
            self._epoch += 1
        view = {
            "epoch": self._epoch,
            "members": [
                {"id": m.id, "host": "h", "pid": m.rank.process.pid, "log": "", "node": self._node(m)} for m in current
            ],
            "store": f"127.0.0.1:{self._store.port}",
            "reason": reason,
            "planned": planned,
        }
        self.views.append(view)
        for member in [*current, *([to] if to else [])]:
            self._send(member, {"view": view})

    def _node(self, member: Member) -> int:
        return int(member.id.partition(".")[2]) % self._hosts

    def _send(self, member: Member, message: dict[str, Any]) -> None:
        try:
            member.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            member.received = b""  # it has ended, and its pipe says so


def _member_main(connection: socket.socket, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ["PHALANX_MEMBERSHIP_FD"] = str(connection.detach())
    return fn(*args)


def tell(kind: str, **values: Any) -> None:
    """Tell the launcher something, from a member."""
    from phalanx.comm.elastic import membership

    current = membership.current()
    assert current is not None
    current.send(kind, **values)


def spawn() -> None:
    """Ask the launcher for another member, and continue when it is in a view: the steps that follow take it in."""
    from phalanx.comm.elastic import membership

    current = membership.current()
    assert current is not None
    assert current.newest is not None
    epoch = current.newest.epoch
    current.send("spawn")
    assert current.await_newer(epoch) is not None, "no joiner came"
