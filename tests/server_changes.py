"""A job whose number of servers changes, without processes: its hand-over, and what is told of it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launching import wait_until
from phalanx.launch.job.servers.commands import ServerCommands
from phalanx.launch.job.servers.hand_over import HandOverPhase
from phalanx.launch.job.start import Starter
from phalanx.launch.process.environment import JobFacts
from phalanx.launch.request.topology import Process, Topology


class FakeHandOver:
    """A hand-over whose phases the test says."""

    def __init__(self, before: Any, after: Any, *, secret: bytes, job: str, workers: int, folder: Path) -> None:
        self.before, self.after, self.folder = list(before), list(after), folder
        self.phase, self.failure, self.is_committed = HandOverPhase.STOP, "", False
        self.lost_worker: int | None = None
        folder.mkdir(parents=True)
        FakeHandOver.last = self

    def give_up(self, why: str, lost_worker: int | None = None) -> None:
        self.failure, self.lost_worker = self.failure or why, lost_worker

    def stop(self, why: str) -> None:
        self.give_up(why)

    def commit(self) -> None:
        self.is_committed = True

    @property
    def is_over(self) -> bool:
        return bool(self.is_committed or self.failure)


class Job:
    """A host with two servers and a worker."""

    def __init__(self, folder: Path, **about: Any) -> None:
        self.folder, self.sent, self.started, self.said = folder, [], [], []
        endpoints = {"server": ("127.0.0.1:1", "127.0.0.1:2"), "worker": ("127.0.0.1:3",), "heter_worker": ()}
        local = [
            Process(role=role, rank=rank, local_rank=rank, node_rank=0, endpoint=endpoint, log_file=f"{role}log.{rank}")
            for role in ("server", "worker")
            for rank, endpoint in enumerate(endpoints[role])
        ]
        counts = ({"server": 2, "worker": 1, "heter_worker": 0},)
        layout = Topology(
            job_id="job",
            master=("127.0.0.1", 0),
            hostnames=("here",),
            local_counts=counts,
            endpoints=endpoints,
            local=tuple(local),
            node_rank=0,
        )
        facts = {"server_dir": f"{folder}/servers", "server_layout_file": f"{folder}/servers/layout.json"} | about
        for rank in range(2):
            (folder / "servers" / str(rank)).mkdir(parents=True)
        self.bound = {process.id: socket.socket() for process in local}
        self.starter = Starter(
            server=SimpleNamespace(
                signal=lambda ids, number: self.sent.append((sorted(ids), number)),
                spawn=lambda name, target, fds, **details: None,
            ),
            layout=layout,
            facts=JobFacts(
                mode="ps",
                log_dir=str(folder),
                attempt=0,
                max_restarts=1,
                timeout_s=1.0,
                gloo_path="",
                interface=None,
                is_multi_host=False,
                secret="00" * 32,
                **facts,
            ),
            inherited={},
            script="train.py",
            script_args=(),
            log_format=None,
            endpoints=self.bound,
        )
        self.has_workers = True
        self.commands = ServerCommands(
            self.starter,
            patience_s=1.0,
            has_workers=lambda: self.has_workers,
            start=lambda process, starter: self.started.append(process),
            adopt=lambda starter: setattr(self, "starter", starter),
            publish=self.said.append,
        )

    def scale(self, count: object) -> str:
        return self.commands.answer({"servers": "scale", "count": count})

    def outcome(self) -> dict[str, Any]:
        wait_until(lambda: self.commands.poll() or not self.commands.answer({"servers": "scaling"}))
        return json.loads(self.commands.answer({"servers": "scaled"}))

    def close(self) -> None:
        self.commands.stop()
        for bound in self.bound.values():
            bound.close()
