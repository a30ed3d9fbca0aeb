"""`ElasticAttempt`: an attempt whose ranks may be lost, replaced, added and taken away while it runs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.elastic.agent import ElasticAgent, MemberExit
from phalanx.launch.elastic.budget import RestartBudget
from phalanx.launch.elastic.control import ControlSocket
from phalanx.launch.elastic.history import EpochEvent
from phalanx.launch.elastic.membership import Membership, SizeLimits
from phalanx.launch.elastic.view import Member, View
from phalanx.launch.job.local_attempt import LocalAttempt, Outcome, make_log
from phalanx.launch.job.report import signal_name
from phalanx.launch.job.root_cause import ProcessExit
from phalanx.launch.process import environment
from phalanx.launch.request import machine
from phalanx.launch.request.elastic import ElasticRange
from phalanx.launch.request.topology import Process, Topology, output_files

logger = logging.getLogger("phalanx.launch")


REFUSED_S = 1.0
"""How long ranks may take to say that the job cannot go on, before they are asked to end."""


@dataclass(kw_only=True)
class ElasticAttempt(LocalAttempt):
    """Processes of one elastic attempt on this host."""

    limits: ElasticRange
    budget: RestartBudget
    per_rank_dir: bool
    control: ControlSocket
    publish: Callable[[list[dict[str, Any]], dict[str, Any]], None]
    """Called with the processes and the state of the members whenever either changes."""

    agent: ElasticAgent = field(init=False)
    _processes: dict[str, Process] = field(default_factory=dict)
    _exit_of: dict[str, ProcessExit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        host, port = self.layout.master
        self.agent = ElasticAgent(
            membership=Membership(SizeLimits(self.limits.least_ranks, self.limits.most_ranks)),
            budget=self.budget,
            rank_host=self,
            node=self.layout.node_rank,
            store=f"{host}:{port}",
            initial=tuple(process.member for process in self.layout.local),
            on_view=self._on_view,
            on_settled=self._on_settled,
            on_event=self._on_event,
        )
        self.control.answer = self._answer

    # What the agent asks for.

    def start_joiner(self, member_id: str) -> None:
        """Start a process that will join."""
        process = self._joiner(member_id)
        make_log(process)
        self.console.follow_another(process.title, process.log_file)
        self._start(process)

    def signal_members(self, member_ids: Sequence[str], number: int) -> None:
        """Send a signal to the process groups of members."""
        self.server.signal([self._processes[member_id].id for member_id in member_ids], number)

    def _joiner(self, member_id: str) -> Process:
        taken = {process.local_rank for process in self._alive.values()}
        return Process(
            role="worker",
            rank=0,
            local_rank=next(slot for slot in range(len(taken) + 1) if slot not in taken),
            node_rank=self.layout.node_rank,
            endpoint="",
            **output_files("worker", member_id, self.facts.log_dir, per_rank_dir=self.per_rank_dir),
            member=member_id,
            is_joiner=True,
        )

    # What the attempt does differently.

    def _spawn(self, process: Process, attempt: int) -> None:
        self._processes[process.member] = process
        with self.agent.open_channel(process.member) as channel:
            if not process.is_joiner:
                self.starter.start(process, attempt, channel)
                return
            address = self.layout.local[0].endpoint.rpartition(":")[0]
            with machine.bind(address, 0, flag="-n") as bound:
                endpoint = "{}:{}".format(*bound.getsockname())
                alone = replace(process, endpoint=endpoint, local_rank=0, node_rank=0)
                starter = replace(
                    self.starter,
                    layout=_alone(self.layout, alone),
                    facts=replace(self.facts, gpus=_own_first(self.facts.gpus, process.local_rank)),
                    endpoints={process.id: bound},
                )
                starter.start(alone, attempt, channel)

    def _register(self, ready: selectors.BaseSelector) -> None:
        super()._register(ready)
        self.agent.register(ready)
        self.control.register(ready)

    def _poll(self, timeout_s: float) -> None:
        super()._poll(timeout_s)
        # Processes that ended together make one view.
        while select.select([self.server.socket], [], [], 0)[0]:
            self._server_event()
        if not self._stopping and not self.stops.pending and self._failed_at is None:
            self.agent.update()
            if self.agent.refusal:
                self._failed_at = time.monotonic()

    def _is_over(self) -> bool:
        may_speak = self._failed_at is not None and time.monotonic() < self._failed_at + REFUSED_S
        if self.agent.refusal and self._alive and may_speak:
            return bool(self.stops.pending)
        return super()._is_over()

    def _on_spawned(self, name: str, pid: int) -> None:
        self._pids[name] = pid
        process = self._alive.get(name)
        if process is not None:
            self.agent.note_start(
                Member(
                    id=process.member,
                    host=self.layout.hostnames[process.node_rank],
                    pid=pid,
                    log=os.path.relpath(process.log_file),
                    node=process.node_rank,
                )
            )
            self._publish()

    def _fails_attempt(self, process: Process, process_exit: ProcessExit) -> bool:
        self._exit_of[process.member] = process_exit
        return not self.agent.note_exit(
            MemberExit(
                member_id=process.member,
                code=process_exit.code,
                said=_describe(process_exit),
                kind=process_exit.kind,
                error=process_exit.error,
            )
        )

    def _is_training(self) -> bool:
        return not self.agent.is_over

    def _note_lingering(self) -> None:
        """Nothing: members that leave end long before the others."""

    def _answer(self, command: dict[str, Any]) -> str:
        size = command.get("scale")
        if not isinstance(size, int) or isinstance(size, bool):
            raise LaunchError(f"{command} is no command of this version. Known: scale, with a whole number.")
        answer = self.agent.scale(size)
        logger.info("phalanx scale: %s", answer)
        return answer

    def wait(self) -> Outcome:
        """As of every attempt; says at the end what was made of the time."""
        try:
            outcome = super().wait()
        finally:
            self.control.answer = None
            self.agent.close()
        if goodput := self.agent.history.goodput(time.time()):
            self.console.write(goodput + "\n")
        return outcome

    def _on_view(self, view: View) -> None:
        first = self._processes.get(view.ids[0])
        if first is not None and self.console.live_path != first.log_file:
            self.console.show_live(first.log_file)
        self._publish()

    def _on_settled(self, view: View) -> None:
        """Leave out ends that the job survived, should it fail later of something else."""
        survived = [self._exit_of[i] for i in self._exit_of if i not in view.ids]
        self._exits = [process_exit for process_exit in self._exits if process_exit not in survived]
        self._publish()

    def _on_event(self, event: EpochEvent) -> None:
        """Append to the run's events. A full disk is no reason to stop."""
        path = f"{self.facts.log_dir}/events.launcher.{self.layout.node_rank}.jsonl"
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event.to_json()) + "\n")

    def _publish(self) -> None:
        status = self.agent.status()
        if not status:
            return
        ranks = {member["id"]: member["rank"] for member in status["members"]}
        rows = [
            {
                "role": process.role,
                "rank": ranks.get(process.member),
                "member": process.member,
                "pid": self._pids[process.id],
                "log": process.log_file,
                "events": environment.events_file(process, self.facts.log_dir),
            }
            for process in self._alive.values()
            if process.id in self._pids
        ]
        self.publish(rows, status)


def _describe(process_exit: ProcessExit) -> str:
    """Return how a process ended, in one short line."""
    if process_exit.code < 0:
        return f"was killed by {signal_name(-process_exit.code)}"
    if process_exit.error:
        return f"raised {process_exit.error.splitlines()[0]}"
    return f"ended with exit code {process_exit.code}"


def _alone(layout: Topology, process: Process) -> Topology:
    """Return the job as a joiner sees it until it has joined: itself."""
    return replace(
        layout,
        hostnames=(layout.hostnames[layout.node_rank],),
        node_rank=0,
        local_counts=({"server": 0, "worker": 1, "heter_worker": 0},),
        endpoints={"server": (), "worker": (process.endpoint,), "heter_worker": ()},
        local=(process,),
    )


def _own_first(gpus: tuple[tuple[str, ...], ...], slot: int) -> tuple[tuple[str, ...], ...]:
    """Return the GPUs of a host in the order for the process at `slot`, whose local rank is 0 until it has joined."""
    return (gpus[slot], *gpus[:slot], *gpus[slot + 1 :]) if gpus else ()
