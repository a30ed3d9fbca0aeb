"""`ElasticAttempt`: an attempt whose ranks may be lost, replaced, added and taken away while it runs."""

from __future__ import annotations

import logging
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from phalanx.cluster.view import Member, View
from phalanx.launch.elastic.agent import ElasticAgent
from phalanx.launch.elastic.control import read_scale
from phalanx.launch.elastic.history import EpochEvent
from phalanx.launch.elastic.joiners import RestartBudget
from phalanx.launch.elastic.nodes.probes import NodeProbes
from phalanx.launch.elastic.rank_host import MemberExit
from phalanx.launch.hang.observe import Watched
from phalanx.launch.hang.watch import HangNews
from phalanx.launch.job.elastic_start import ElasticStart
from phalanx.launch.job.local_attempt import LocalAttempt
from phalanx.launch.job.start import make_log
from phalanx.launch.process import environment
from phalanx.launch.reports.logs import append_event
from phalanx.launch.reports.outcome import Outcome
from phalanx.launch.reports.report import describe_briefly
from phalanx.launch.reports.root_cause import ProcessExit
from phalanx.launch.request import machine
from phalanx.launch.request.topology import Process, Topology, output_files
from phalanx.launch.slow.goodput import Goodput
from phalanx.launch.slow.stragglers import Losses

logger = logging.getLogger("phalanx.launch")


REFUSED_S = 1.0
"""How long ranks may take to say that the job cannot continue, before they are asked to end."""


@dataclass(kw_only=True)
class ElasticAttempt(LocalAttempt):
    """Processes of one elastic attempt on this host."""

    place: ElasticStart
    budget: RestartBudget
    per_rank_dir: bool
    publish: Callable[[list[dict[str, Any]], dict[str, Any]], None]
    """Called with the processes and the state of the members whenever either changes."""

    agent: ElasticAgent = field(init=False)
    probes: NodeProbes = field(init=False)
    _drain_until: float | None = None
    _must_stop: bool = False
    _causes: list[ProcessExit] | None = None
    _processes: dict[str, Process] = field(default_factory=dict)
    _exit_of: dict[str, ProcessExit] = field(default_factory=dict)
    _watched: tuple[View, bool] | None = None
    """The view in use, and whether all of its members compute in it, when the watches were told of it."""

    _ranks_watched: list[tuple[int, Process]] = field(default_factory=list)
    """The ranks of this node that are watched for hangs, by their numbers there."""

    has_goodput_always: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.group = self.place.group
        self.agent = ElasticAgent(
            group=self.group,
            budget=self.budget,
            rank_host=self,
            initial=self.place.initial,
        )
        self.probes = NodeProbes(self.group, self.hang.receive_probe)
        if self.place.meeting is not None:
            self.hang.channel = self.probes
        self.place.replay()

    def start(self, store: socket.socket | None) -> None:
        """As of every attempt; on a node that comes later the ranks are started once the others know of it."""
        super().start(store)
        if self.place.remote_state:
            self.agent.join(self.place.remote_state)

    # What the agent asks for.

    @property
    def free_slots(self) -> int:
        """How many more processes may run here now."""
        return len(self._slots)

    @property
    def _slots(self) -> list[int]:
        taken = {process.local_rank for process in self._alive.values()}
        return [slot for slot in range(self.group.places[self.group.node].capacity) if slot not in taken]

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
        return Process(
            role="worker",
            rank=0,
            local_rank=self._slots[0],
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
            with machine.bind(self.place.offer.address, 0, flag="-n") as bound:
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

    def _poll(self, timeout_s: float) -> None:
        super()._poll(timeout_s)
        # Processes that ended together make one view.
        while select.select([self.server.socket], [], [], 0)[0]:
            self._server_event()
        is_stopping = self._stopping or bool(self.stops.pending) or self._failed_at is not None
        self.agent.update(is_stopping=is_stopping)
        self._watch_members()
        self.probes.update()
        if not is_stopping and self.agent.refusal:
            # Ranks that end because of it are not the cause.
            self._failed_at, self._causes = time.monotonic(), [*self._exits, *self._remote_exits]

    def _is_over(self) -> bool:
        is_drained, is_asked = self._drain_until is not None, self.stops.pending[:1] == [signal.SIGTERM]
        if is_asked and is_drained and not self._must_stop:
            # As everywhere a second signal kills, but only what is of this node.
            self.stops.take()
            logger.warning("asked again: %s are killed, the others continue", self._alive_titles())
            return True
        may_drain = self._failed_at is None and not self._must_stop and self.agent.scaling.may_drain
        if is_asked and may_drain:
            # The other nodes continue; here ranks end after the step they compute.
            self.stops.take()
            logger.warning("asked to end by SIGTERM: the ranks of this node leave, the others continue")
            self._drain_until = time.monotonic() + self.stop_grace_s
            self.agent.scaling.drain()
        if self._drain_until is not None and self.agent.scaling.is_deserted:
            # All nodes are about to be taken away: nobody is left to continue.
            self._drain_until = None
            self.stops.pending.append(signal.SIGTERM)
            return True
        if self._drain_until is not None and time.monotonic() > self._drain_until:
            logger.warning("%s did not leave in time", self._alive_titles())
            return True
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
                    node=self.group.node,
                )
            )
            self._publish()

    def _fails_attempt(self, process: Process, process_exit: ProcessExit) -> bool:
        self._exit_of[process.member] = process_exit
        if process_exit.failed:
            self._broadcast_exit(process.member, process_exit)
        return not self.agent.note_exit(
            MemberExit(
                member_id=process.member,
                code=process_exit.code,
                description=describe_briefly(process_exit),
                kind=process_exit.kind,
                error=process_exit.error,
            )
        )

    def _broadcast_exit(self, member_id: str, process_exit: ProcessExit) -> None:
        self.group.broadcast({"exit": {"id": member_id, "how": process_exit.to_json()}})

    def _end_all(self, number: int, *, may_save: bool) -> None:
        if may_save:
            self.group.broadcast({"stop": int(number)})
        super()._end_all(number, may_save=may_save)

    def _is_training(self) -> bool:
        return bool(self._alive) if self._drain_until is not None else not self.agent.is_over

    def _watch_members(self) -> None:
        """Watch the ranks of this node by their numbers in the view in use."""
        membership = self.group.membership
        view, is_settled = membership.view, membership.is_settled
        if view is None or (view, is_settled) == self._watched:
            return
        self._watched = (view, is_settled)
        ranks = self._ranks_of(view) if len(view.members) > 1 else []
        processes = [
            Watched(title=f"rank {number}", role=process.role, pid=self._pids[process.id], member=process.member)
            for number, process in ranks
        ]
        # What a change of the members costs is counted by itself.
        self.slow.watch(processes if is_settled else ())
        # Until ranks take a planned view up they compute in the one before, with its numbers.
        if is_settled or not view.planned:
            self._ranks_watched = ranks
            self.hang.watch(processes)

    def _ranks_of(self, view: View) -> list[tuple[int, Process]]:
        ranked = [(rank, self._processes.get(member_id)) for rank, member_id in enumerate(view.ids)]
        return [(rank, process) for rank, process in ranked if process is not None and process.id in self._alive]

    def _processes_of(self, titles: Collection[str]) -> list[Process]:
        return [p for rank, p in self._ranks_watched if f"rank {rank}" in titles and p.id in self._alive]

    def _take_hang_news(self, news: HangNews) -> None:
        was_failed = self._failed_at is not None
        super()._take_hang_news(news)
        if self._failed_at is not None and not was_failed:
            # The others report it as this node does, and have no process that failed.
            self._broadcast_exit(self._exits[-1].title.removeprefix("member "), self._exits[-1])
            self.group.broadcast({"refuse": f"the job is stalled: {news.verdict.lines[0]}"})

    def _note_lingering(self) -> None:
        """Nothing: members that leave end long before the others."""

    def _answer(self, command: dict[str, Any]) -> str:
        answer = self.agent.scale(read_scale(command))
        logger.info("phalanx scale: %s", answer)
        return answer

    def wait(self) -> Outcome:
        """As of every attempt; a job that the others refuse fails by what was there before."""
        try:
            outcome = super().wait()
            if self._causes is not None:
                outcome.exits, outcome.refusal = self._causes, self.agent.refusal
        finally:
            self.agent.close()
        return outcome

    def _goodput(self, losses: Losses) -> str:
        history = self.agent.history
        if history.start_s is None:
            return ""
        return Goodput(
            total_s=max(time.time() - history.started, 1e-9),
            start_s=history.start_s,
            losses=losses,
            stalls=history.stalls,
            redone=history.redone,
        ).describe()

    def on_remote_exit(self, member_id: str, process_exit: dict[str, Any]) -> None:
        """Remember how a process of another node failed."""
        self._exit_of[member_id] = ProcessExit.from_json(process_exit)
        self._remote_exits.append(self._exit_of[member_id])

    def on_probe(self, node: int, message: dict[str, Any]) -> None:
        """Take part in a probe at the ranks of all nodes."""
        self.probes.take(node, message)

    def on_remote_stop(self, node: int) -> None:
        """End the ranks here too, who save with the others."""
        if not self.stops.pending and not self._stopping:
            logger.warning("the launcher of node %d was asked to end the job", node)
            self._must_stop = True
            self.stops.pending.append(signal.SIGTERM)

    def on_view(self, view: View) -> None:
        """Show the log of the first rank of this node as it grows."""
        self._watch_members()
        first = next((self._processes[i] for i in view.ids if i in self._processes), None)
        if first is not None and self.console.live_path != first.log_file:
            self.console.show_live(first.log_file)
        self._publish()

    def on_settled(self, view: View) -> None:
        """Leave out ends that the job survived, should it fail later of something else."""
        survived = [self._exit_of[i] for i in self._exit_of if i not in view.ids]
        self._exits = [process_exit for process_exit in self._exits if process_exit not in survived]
        self._remote_exits = [process_exit for process_exit in self._remote_exits if process_exit not in survived]
        self._publish()

    def on_event(self, event: EpochEvent) -> None:
        """Append to the run's events."""
        append_event(self.facts.log_dir, event.to_json(), node=self.group.node)

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
