"""`Starter`: start the processes of a job through the fork server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.launch.job.fork_server_handle import ForkServerHandle
from phalanx.launch.process import environment
from phalanx.launch.process.environment import JobFacts
from phalanx.launch.request.topology import Process, Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Starter:
    """What every process of an attempt on this host is started with."""

    server: ForkServerHandle
    layout: Topology
    facts: JobFacts
    inherited: Mapping[str, str]
    """The launcher's environment."""

    script: str
    script_args: tuple[str, ...]
    log_format: str | None
    endpoints: Mapping[str, socket.socket]
    """Bound socket of each process, by process id; open for as long as processes may be started."""

    @property
    def store_id(self) -> str:
        """Name of the store's process."""
        return f"store.{self.facts.attempt}"

    def start_store(self, listening: socket.socket) -> None:
        """Ask for the process that holds the job's store."""
        host, port = listening.getsockname()
        self.server.spawn(
            self.store_id,
            "store",
            [listening.fileno()],
            config={"host": host, "port": port},
            env={},
            log=f"{self.facts.log_dir}/launcher.store",
            cwd=os.getcwd(),
        )

    def start(self, process: Process, attempt: int, channel: socket.socket | None = None) -> None:
        """Ask for one process of the job; it adds to its log file.

        Args:
            process: Which one.
            attempt: How often it, or the whole job, was started before.
            channel: Its end of the channel to the agent, in an elastic job.
        """
        fds = [self.endpoints[process.id].fileno()]
        if channel is not None:
            fds.append(channel.fileno())
        record = environment.error_file(process, self.facts.log_dir)
        Path(record).unlink(missing_ok=True)
        self.server.spawn(
            process.id,
            "script",
            fds,
            env=environment.build(process, self.layout, replace(self.facts, attempt=attempt), self.inherited),
            log=process.log_file,
            env_file=process.env_file,
            log_format=self.log_format,
            cwd=os.getcwd(),
            script=self.script,
            args=self.script_args,
            rank=process.rank,
            error_file=record,
        )


def make_log(process: Process) -> None:
    """Make the log of a process and its folder: one of its own (--per-rank-dir), or deleted while the job ran."""
    path = Path(process.log_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
