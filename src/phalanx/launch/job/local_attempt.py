"""`LocalAttempt`: start the processes of a job on this host, watch them, stop all when one fails."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.errors import InternalError
from phalanx.launch.hang.observe import Watched
from phalanx.launch.hang.verdict import Verdict
from phalanx.launch.hang.watch import HangNews, HangWatch
from phalanx.launch.job.servers.commands import ServerCommands
from phalanx.launch.job.start import Starter, make_log
from phalanx.launch.process.linux import StopSignals
from phalanx.launch.process.node_link_handle import NodeLinkHandle
from phalanx.launch.reports.console import Console
from phalanx.launch.reports.exit_records import ExitRecords
from phalanx.launch.reports.outcome import Outcome
from phalanx.launch.reports.report import describe_briefly, describe_exit, render_hang
from phalanx.launch.reports.root_cause import ProcessExit, is_consequence
from phalanx.launch.reports.terminal import fit_terminal
from phalanx.launch.request.topology import Process
from phalanx.launch.slow.goodput import Goodput
from phalanx.launch.slow.stragglers import Losses
from phalanx.launch.slow.watch import SlowWatch
from phalanx.launch.slow.words import lines_of

if TYPE_CHECKING:
    from phalanx.launch.elastic.control import ControlSocket

logger = logging.getLogger("phalanx.launch")

POLL_S = 0.05
"""How often log files are looked at."""

SETTLE_S = 0.5
"""How long to wait for the cause when the first failure only says that a peer is gone."""

FAILURE_GRACE_S = 1.0
"""Between asking the rest of a failed job to end and killing it."""

STOP_GRACE_S = 30
"""The same when the user or a scheduler ends the job, unless PHALANX_STOP_GRACE_S says otherwise: time to save. As long
as Kubernetes and Slurm wait."""

WARN_AFTER_S = 2.0
"""How long processes may take to end before that is mentioned."""

NODE_SETTLE_S = 1.0
"""How long to wait for other hosts to say what failed there."""

LINGER_S = 20
"""How long workers may run after another exited with 0 before a warning."""

DISK_CHECK_S = 1.0
"""How often to look whether there is room for logs."""


@dataclass(kw_only=True)
class LocalAttempt:
    """Processes of one attempt on this host."""

    starter: Starter
    console: Console
    stops: StopSignals
    link: NodeLinkHandle | None
    restarts: int
    """How many processes may be started again, each alone; 0 where the whole job is started again instead."""

    stop_grace_s: float
    """Between asking processes to end that need not hurry, and killing them."""

    check_disk_space: Callable[[], None]
    """Called every few seconds, to look whether there is room for logs."""

    on_started: Callable[[dict[str, int]], None]
    """Called with the pid of every local process when all are there, and again after each restart."""

    on_servers: Callable[[str], None]
    """Called with how far a change of the number of servers is, and with "" when it is over."""

    on_hang: Callable[[Verdict | None], None]
    """Called with the verdict when the job is stalled, and with None when it does again."""

    hang: HangWatch
    """Watches the processes of this attempt."""

    on_slow: Callable[[Losses, str], None]
    """Called with what was lost in the last minute now and then, and at the end with all of it and the goodput."""

    has_goodput_always: ClassVar[bool] = False
    """Whether the goodput is said where no rank was slow, too."""

    slow: SlowWatch
    """Adds up where they lose time."""

    control: ControlSocket | None = None
    """Takes commands for the job."""

    _alive: dict[str, Process] = field(default_factory=dict)
    _pids: dict[str, int] = field(default_factory=dict)
    _starts: dict[str, int] = field(default_factory=dict)
    _exits: list[ProcessExit] = field(default_factory=list)
    _stopping: bool = False
    _failed_at: float | None = None
    _remote_exits: list[ProcessExit] = field(default_factory=list)
    _is_reported: bool = False
    _is_warned: bool = False
    _next_disk_check: float = 0.0

    def __post_init__(self) -> None:
        self.server, self.layout, self.facts = self.starter.server, self.starter.layout, self.starter.facts
        self._exit_records = ExitRecords(self.layout, self.facts.log_dir, self._pids)
        self._server_commands = ServerCommands(
            self.starter,
            patience_s=self.stop_grace_s,
            has_workers=self._has_workers,
            start=self._start,
            adopt=self._adopt_servers,
            publish=self._publish_servers,
        )
        if self.control is not None:
            self.control.answer = self._answer

    def start(self, store: socket.socket | None) -> None:
        """Ask the fork server for every process. It answers when torch is there.

        Args:
            store: Listening socket of the job's store; None on hosts other than the first.
        """
        if store is not None:
            self.starter.start_store(store)
        for process in self.layout.local:
            make_log(process)
        self._follow_logs()
        for process in self.layout.local:
            self._start(process)

    def _start(self, process: Process, starter: Starter | None = None) -> None:
        make_log(process)
        attempt = self._starts.get(process.id, self.facts.attempt)
        self._starts[process.id] = attempt + 1
        self._alive[process.id] = process
        if starter is None:
            self._spawn(process, attempt)
        else:
            starter.start(process, attempt)

    def _spawn(self, process: Process, attempt: int) -> None:
        self.starter.start(process, attempt)

    def _follow_logs(self) -> None:
        workers = [p for p in self.layout.local if p.role == "worker"]
        live = workers[0].log_file if workers else None
        others = [(p.title, p.log_file) for p in self.layout.local if p.log_file != live]
        self.console.follow(live, others)

    def wait(self) -> Outcome:
        """Watch until the job is over, here and elsewhere, and bring down what is left.

        Raises:
            LaunchError: If torch cannot be imported.
        """
        try:
            while not self._is_over():
                self._poll(POLL_S)
        finally:
            if self.control is not None:
                self.control.answer = None
            self._server_commands.stop()
            self.hang.stop()
            losses = self.slow.stop()
        stopped_by = self.stops.take()
        failed = self._failed_at is not None
        if not failed and not stopped_by:
            self._finish_servers()
            failed = self._failed_at is not None
        # Where another host's launcher was stopped, the ranks here save with its.
        is_stop = stopped_by or any(e.role == "launcher" for e in self._remote_exits)
        # A closed terminal (SIGHUP) is no reason to lose what scripts save at a SIGTERM.
        self._end_all(signal.SIGINT if stopped_by == signal.SIGINT else signal.SIGTERM, may_save=bool(is_stop))
        self._server_commands.delete_rest()
        if failed:
            self._report_failure([e for e in self._exits if e.failed or e.code == 0])
            self._collect_remote_failures()
        elif stopped_by:
            self._report_failure([self._exit_records.of_launcher(stopped_by)])
        self.console.finish(failed=failed)
        self._report_losses(losses, is_shown=not failed)
        return Outcome(exits=self._exits + self._remote_exits, failed=failed, stopped_by=stopped_by)

    def _is_over(self) -> bool:
        if self.stops.pending:
            return True
        if self._failed_at is not None:
            causes = [e for e in self._exits if e.failed and not is_consequence(e)]
            settle = 0.0 if causes or self._remote_exits else SETTLE_S
            return time.monotonic() >= self._failed_at + settle
        if self._is_training():
            return False
        if self.link is None:
            return True
        if not self._is_reported:
            self._is_reported = True
            self.link.report_done(self.facts.attempt)
        return self.link.all_done

    def _is_training(self) -> bool:
        """Whether the end of some process is waited for."""
        return any(p.role == "worker" for p in self._alive.values())

    def _poll(self, timeout_s: float) -> None:
        """Take what has happened, waiting for it at most `timeout_s`."""
        with selectors.DefaultSelector() as ready:
            self._register(ready)
            for key, _ in ready.select(timeout_s):
                key.data()
        self.console.poll()
        self._note_lingering()
        if not self._stopping and self._failed_at is None:
            self._server_commands.poll()
        if (news := self.hang.take()) is not None:
            self._take_hang_news(news)
        if (losses := self.slow.take()) is not None:
            self.on_slow(losses, "")
        if time.monotonic() > self._next_disk_check:
            self._next_disk_check = time.monotonic() + DISK_CHECK_S
            self.check_disk_space()

    def _register(self, ready: selectors.BaseSelector) -> None:
        """Add what to wait for, each with the function that takes it."""
        ready.register(self.server.socket, selectors.EVENT_READ, self._server_event)
        ready.register(self.stops.woken, selectors.EVENT_READ, self.stops.clear)
        if self.link is not None:
            ready.register(self.link.socket, selectors.EVENT_READ, self._link_event)
        if self.control is not None:
            self.control.register(ready)

    def _note_lingering(self) -> None:
        """Warn once that some workers exited with 0 long ago while others still run: often those wait for them."""
        if self._is_warned or self._stopping or self._failed_at is not None:
            return
        ended = [e for e in self._exits if e.role == "worker" and time.time() - e.time > LINGER_S]
        alive = [p.title for p in self._alive.values() if p.role == "worker"]
        if ended and alive:
            self._is_warned = True
            names = ", ".join(e.title for e in ended)
            logger.warning(
                "%s ended with exit code 0 over %d s ago, while %s still run(s)", names, LINGER_S, ", ".join(alive)
            )

    def _take_hang_news(self, news: HangNews) -> None:
        """Show why the job is stalled, or that it does again, or end it."""
        verdict = news.verdict
        if news.kind == "hung":
            self.on_hang(verdict)
            self.console.write(render_hang(verdict, self.hang.settings.timeout_s))
        elif news.kind == "resumed":
            self.on_hang(None)
            seconds = time.monotonic() - verdict.at + verdict.waited_s
            logger.warning(
                "the job makes progress again, after %.0f s. Waits as long as that are not reported again", seconds
            )
        elif self._failed_at is None and not self._stopping:
            first = [*self._processes_of(verdict.culprits), *self._alive.values(), *self.layout.local][0]
            self._exits.append(self._exit_records.of_hang(first, verdict))
            self._failed_at = time.monotonic()

    def _report_losses(self, losses: Losses, *, is_shown: bool) -> None:
        """Say whom the ranks waited for, and what was left of the time."""
        goodput = self._goodput(losses)
        self.on_slow(losses, goodput)
        lines = [*lines_of(losses)] if is_shown else []
        if lines or self.has_goodput_always:
            lines.append(goodput)
        if any(lines):
            self.console.write(fit_terminal("\n".join(lines) + "\n"))

    def _goodput(self, losses: Losses) -> str:
        """Return in one line what was made of the time; "" where no step was made."""
        start_s = self.slow.start_s
        return Goodput(total_s=losses.total_s + start_s, start_s=start_s, losses=losses).describe()

    def _processes_of(self, titles: Collection[str]) -> list[Process]:
        """Return the processes of this host that a hang report names."""
        return [process for process in self.layout.local if process.title in titles]

    def _server_event(self) -> None:
        event = self.server.receive()
        if "spawned" in event:
            self._on_spawned(event["spawned"], event["pid"])
        if "exited" in event:
            self._on_exit(event["exited"], os.waitstatus_to_exitcode(event["status"]), event["time"])

    def _on_spawned(self, name: str, pid: int) -> None:
        self._pids[name] = pid
        self._note_started()

    @property
    def _are_all_there(self) -> bool:
        """Whether the pid of each process of the job here is known."""
        return all(process.id in self._pids for process in self.layout.local)

    def _note_started(self) -> None:
        if self._are_all_there:
            self.on_started(self._pids)
            self._watch()

    def _watch(self) -> None:
        """Watch the processes of a job in which some wait for others."""
        processes = [Watched(title=p.title, role=p.role, pid=self._pids[p.id]) for p in self.layout.local]
        if sum(map(len, self.layout.endpoints.values())) > 1:
            # While the servers change, workers wait for servers that wait for the launcher: that is no hang.
            self.hang.watch([] if self._server_commands.busy else processes)
            self.slow.watch(processes)

    def _publish_servers(self, progress: str) -> None:
        self.on_servers(progress)
        if self._are_all_there:
            self._watch()

    def _on_exit(self, name: str, code: int, at: float) -> None:
        if name == self.starter.store_id and not self._stopping:
            raise InternalError(f"The job's store ended by itself; see {self.facts.log_dir}/launcher.store.")
        process = self._alive.pop(name, None)
        if process is None:
            return
        process_exit = self._exit_records.of_process(process, code, at, is_stopping=self._stopping)
        if self._server_commands.is_spare(process, describe_briefly(process_exit), failed=process_exit.failed):
            return
        self.hang.note_end(process.title, describe_exit(process_exit))
        goes_on = not self._stopping and self._failed_at is None
        if goes_on and self._server_commands.take_end(process, failed=process_exit.failed):
            self._start(process)
            return
        is_news = goes_on and self._fails_attempt(process, process_exit)
        if is_news and self.restarts:
            self._restart_process(process, process_exit)
            return
        self._exits.append(process_exit)
        if is_news:
            self._failed_at = time.monotonic()

    def _fails_attempt(self, _process: Process, process_exit: ProcessExit) -> bool:
        """Whether the attempt fails with the end of a process."""
        return process_exit.failed

    def _restart_process(self, process: Process, process_exit: ProcessExit) -> None:
        self.restarts -= 1
        logger.warning(
            "%s %s. Starting it again, the others keep running; restarts left: %d",
            process_exit.title,
            describe_exit(process_exit),
            self.restarts,
        )
        self._start(process)

    def _answer(self, command: dict[str, Any]) -> str:
        """Do what a command asks for; raises LaunchError."""
        return self._server_commands.answer(command)

    def _adopt_servers(self, starter: Starter) -> None:
        """Continue with other servers; the caller ends those there were."""
        logs = {process.log_file for process in self.layout.local}
        for process in starter.layout.local:
            if process.log_file not in logs:
                self.console.follow_another(process.title, process.log_file)
        self.starter, self.layout, self.facts = starter, starter.layout, starter.facts
        self._exit_records = ExitRecords(self.layout, self.facts.log_dir, self._pids)
        self._note_started()

    def _has_workers(self) -> bool:
        """Whether workers of this host train; those of other hosts are not seen."""
        return self._is_training() or all(p.role != "worker" for p in self.layout.local)

    def _link_event(self) -> None:
        assert self.link is not None
        self.link.take()
        for message in self.link.take_probes():
            self.hang.receive_probe(message)
        failures = [ProcessExit.from_json(e) for e in self.link.failures(self.facts.attempt)]
        if failures:
            self._remote_exits = failures
            if self._failed_at is None:
                self._failed_at = time.monotonic()

    def _finish_servers(self) -> None:
        """End the servers of a parameter-server job whose workers are all done."""
        if self.facts.mode != "ps":
            return
        logger.info("all workers exit, going to finish parameter server and heter_worker.")
        self._end_all(signal.SIGTERM, may_save=True)
        logger.info("all parameter server are killed")

    def _end_all(self, number: int, *, may_save: bool) -> None:
        """Ask every process to end, then kill what is left. A second stop signal cuts the grace short."""
        self._stopping = True
        self.server.signal([*self._alive], number)
        grace_s = self.stop_grace_s if may_save else FAILURE_GRACE_S
        started, is_reported = time.monotonic(), not may_save
        while self._alive and time.monotonic() < started + grace_s and not self.stops.pending:
            self._poll(POLL_S)
            if self._alive and not is_reported and time.monotonic() > started + WARN_AFTER_S:
                is_reported = True
                logger.info("waiting up to %g s for %s to end; a second signal kills", grace_s, self._alive_titles())
        if self._alive and may_save:
            logger.warning(
                "killing %s after %.0f s: what they were saving is lost. Set PHALANX_STOP_GRACE_S to give them longer",
                self._alive_titles(),
                time.monotonic() - started,
            )
        self.server.signal([*self._alive, self.starter.store_id], signal.SIGKILL)
        while self._alive:
            self._poll(POLL_S)

    def _alive_titles(self) -> str:
        return ", ".join(process.title for process in self._alive.values())

    def _report_failure(self, exits: list[ProcessExit]) -> None:
        """Tell the other hosts that the attempt is over here, and why."""
        if self.link is not None:
            self.link.report_failure(self.facts.attempt, [process_exit.to_json() for process_exit in exits])

    def _collect_remote_failures(self) -> None:
        """Give the other hosts time to say what failed there."""
        deadline = time.monotonic() + NODE_SETTLE_S
        while self.link is not None and time.monotonic() < deadline:
            self._poll(POLL_S)
