"""`Launcher`: the launcher of a node: detect hardware, check options, start processes, monitor, restart."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cluster.env.environment import Environment
from phalanx.cluster.runtime_folder import runtime_folder
from phalanx.errors import LaunchError, PeerLostError, PhalanxError
from phalanx.i18n import language, tr
from phalanx.launch import preload
from phalanx.launch.elastic.budget import RestartBudget
from phalanx.launch.hang.verdict import Verdict
from phalanx.launch.hang.watch import HangSettings, HangWatch
from phalanx.launch.job import attempt_resources, registry, report
from phalanx.launch.job.console import Console
from phalanx.launch.job.fork_server_handle import ForkServerHandle, ForkServerLostError
from phalanx.launch.job.local_attempt import POLL_S, STOP_GRACE_S, LocalAttempt, Outcome
from phalanx.launch.job.logs import LogFolder
from phalanx.launch.job.root_cause import first_failure
from phalanx.launch.job.start import Starter
from phalanx.launch.process import environment, wire
from phalanx.launch.process.linux import StopSignals
from phalanx.launch.process.node_link_handle import NodeLinkHandle
from phalanx.launch.process.source_files import path_for_user
from phalanx.launch.request import machine, options_from_rank_table, options_from_scheduler, preflight
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.options import Options
from phalanx.launch.request.request import ROLES, LaunchRequest, check_script, resolve
from phalanx.launch.request.topology import NodeOffer, Topology, build_topology
from phalanx.launch.slow.stragglers import Losses
from phalanx.launch.slow.watch import SlowWatch
from phalanx.launch.slow.words import lines_of
from phalanx.versions import require_torch

if TYPE_CHECKING:
    from phalanx.launch.elastic.control import ControlSocket
    from phalanx.launch.job.elastic_start import ElasticStart

logger = logging.getLogger("phalanx.launch")


class Launcher:
    """One job as this host's launcher sees it."""

    def __init__(self, options: Options, server: ForkServerHandle, console: Console) -> None:
        self._options = options
        self._server = server
        self._console = console
        self._inherited: Mapping[str, str] = dict(os.environ)
        self._job_id = uuid.uuid4().hex[:12]
        self._link: NodeLinkHandle | None = None
        self._restarts = options.max_restarts
        self._budget = RestartBudget(None, options.max_restarts)
        self._control: ControlSocket | None = None

    def run(self) -> int:
        """Run the job to its end.

        Returns:
            The exit code: 0 after success, else that of the process that failed first (128 + signal), or 128 + the
            signal that stopped the launcher.

        Raises:
            PhalanxError: If the job cannot be started, or another host is missing or lost.
        """
        host = Machine.detect(self._inherited)
        require_torch()
        check_script(self._options.training_script)
        self._options = options_from_scheduler.fill(self._options, self._inherited)
        self._options = options_from_rank_table.fill(self._options, self._inherited, host)
        request = resolve(self._options, host)
        if request.elastic is not None and self._options.replicas is None:
            self._options = replace(self._options, replicas=request.elastic.most_ranks)
        self._secret = attempt_resources.job_secret(request, self._inherited)
        self._stop_grace_s = Environment(self._inherited).integer("PHALANX_STOP_GRACE_S", minimum=1) or STOP_GRACE_S
        threads = self._fix_threads(request, host)
        self._console.write(report.banner(self._options.banner_items()))
        self._log_mode(request, host)
        if flag := self._options.misplaced_flag:
            logger.warning(
                "%s stands after the script, so the script gets it. To give it to the launcher: phalanx run %s ... %s",
                flag,
                flag,
                self._options.training_script,
            )
        logger.info(threads)
        for warning in preflight.look(self._inherited):
            logger.warning(warning)
        self._stops = StopSignals()
        self._logs = LogFolder(self._options.log_dir)
        runtime = self._runtime_folder()
        self._gloo_path = str(runtime / f"gloo-{self._job_id}")
        script = self._options.training_script
        with contextlib.ExitStack() as stack:
            if request.elastic is not None:
                self._control = stack.enter_context(self._open_control(runtime))
            control = self._control.path if self._control is not None else None
            self._entry = stack.enter_context(
                registry.RegistryEntry(runtime, self._job_id, script, request.mode, control)
            )
            try:
                return self._run_attempts(request)
            except PhalanxError as error:
                self._logs.record_end(code=1, error=type(error).__name__, message=str(error))
                raise
            finally:
                shutil.rmtree(self._gloo_path, ignore_errors=True)

    def _open_control(self, runtime: Path) -> ControlSocket:
        from phalanx.launch.elastic.control import ControlSocket

        return ControlSocket(runtime / f"{self._job_id}.sock")

    def _runtime_folder(self) -> Path:
        """This user's run-time folder, or the log folder in its place, where `phalanx ps` does not look."""
        try:
            return runtime_folder()
        except LaunchError as error:
            logger.warning(tr("`phalanx ps` will not show this job: {why}", why=error))
            return self._logs.path

    def _fix_threads(self, request: LaunchRequest, host: Machine) -> str:
        """Give each local process its share of the cores, before the libraries that read it are loaded; say which."""
        chosen = self._inherited.get("OMP_NUM_THREADS")
        threads = chosen or str(max(1, host.cores // max(1, request.local_processes)))
        environment = {"OMP_NUM_THREADS": threads, "PHALANX_LANG": language()}
        self._server.configure(environment, preload=() if request.elastic is None else preload.ELASTIC)
        source = "from your environment" if chosen else f"of {host.cores} cores"
        setting = f"OMP_NUM_THREADS={threads} for each process ({source})"
        if request.mode == "ps" or request.gpus or self._options.nproc_per_node is not None:
            return setting
        return f"{setting}. No -n given: 1 process, as one process uses every core. -n 2 starts two."

    def _log_mode(self, request: LaunchRequest, host: Machine) -> None:
        gpus = len(host.usable_gpus)
        if request.mode == "ps":
            logger.info("Run parameter-sever mode. pserver arguments:%s, cuda count:%d", list(request.mode_flags), gpus)
            if gpus and not request.gpus:
                logger.info("Workers compute on the CPU. --gpus gives them GPUs; servers never need one.")
            return
        if request.mode_flags:
            logger.info("Run collective mode. gpu arguments:%s, cuda count:%d", list(request.mode_flags), gpus)
        else:
            compiled = "compiled with cuda" if host.has_cuda_build else "not compiled with cuda"
            logger.warning("Not found distinct arguments and %s. Default use collective mode", compiled)
        self._console.write(f"launch train in {'GPU' if request.gpus else 'CPU'} mode\n")
        origins = self._options.origins
        if request.nodes.is_multi_node and "node_rank" in origins:
            sources = ", ".join(origins[name] for name in ("node_rank", "nnodes") if name in origins)
            logger.info("this is node %d of %d (from %s)", request.nodes.rank, request.nodes.count, sources)

    def _run_attempts(self, request: LaunchRequest) -> int:
        if request.nodes.is_multi_node and request.elastic is None:
            self._link = self._join_link(request)
        attempt = 0
        while True:
            try:
                outcome = self._run_attempt(request, attempt)
            except ForkServerLostError as lost:
                # Other hosts count this one as lost: its link to them was a child of that server too.
                if not self._restarts or request.nodes.is_multi_node:
                    raise
                self._console.finish(failed=True)
                self._log_restart(str(lost), request, attempt)
                self._server.restart()
            else:
                # With servers, single processes were started again as long as they might.
                # Nodes of an elastic job replace what is lost, and part when it fails.
                has_parted = request.elastic is not None and request.nodes.is_multi_node
                is_last = request.mode == "ps" or not self._restarts or has_parted
                if not outcome.failed or outcome.stopped_by or is_last:
                    return self._end(outcome)
                first = first_failure(outcome.exits)
                # An elastic job may be refused without a process that failed.
                why = outcome.refusal if first is None else f"{first.title} {report.describe_exit(first)}"
                self._log_restart(f"{why}.", request, attempt)
            self._restarts -= 1
            if request.mode == "collective":  # servers resume from their state
                self._logs.archive_attempt(attempt)
            attempt += 1

    def _end(self, outcome: Outcome) -> int:
        if self._link is not None:
            self._link.leave()
        if outcome.stopped_by:
            name = signal.Signals(outcome.stopped_by).name
            self._console.write(tr("stopped by {signal}; every process of the job has ended", signal=name) + "\n")
            workers = [e.code for e in outcome.exits if e.role == "worker"]
            # Asked to end, every worker saved and ended well: nothing is lost, and a scheduler need not be alarmed.
            ended_well = outcome.stopped_by != signal.SIGINT and workers and not any(workers)
            code = 0 if ended_well else 128 + outcome.stopped_by
            self._logs.record_end(code=code, stopped_by=name)
            return code
        if not outcome.failed:
            self._logs.record_end(code=0)
            return 0
        first = first_failure(outcome.exits)
        if first is None:
            raise PeerLostError(outcome.refusal)
        others = [e for e in outcome.exits if e is not first]
        self._console.write(report.render(first, others))
        self._logs.record_end(code=first.exit_code, first=first.to_json(), said=report.describe_exit(first))
        return first.exit_code

    def _log_restart(self, why: str, request: LaunchRequest, attempt: int) -> None:
        logs = path_for_user(
            str(self._logs.path / f"attempt-{attempt}" if request.mode == "collective" else self._logs.path)
        )
        total = self._options.max_restarts
        logger.warning(
            "%s Restarting the whole job, restart %d of %d; logs of the failed attempt are in %s",
            why,
            total - self._restarts + 1,
            total,
            logs,
        )

    def _run_attempt(self, request: LaunchRequest, attempt: int) -> Outcome:
        restarts = self._restarts if request.mode == "ps" else 0
        self._entry.begin_attempt()
        with attempt_resources.AttemptResources(request) as stage:
            starter = self._starter(stage, attempt)
            layout, facts = starter.layout, starter.facts
            with self._logs.tolerating(attempt_resources.ENDPOINTS):
                attempt_resources.write_endpoints(layout, facts.log_dir)
            start = LocalAttempt if request.elastic is None else self._elastic_attempt()
            trial = start(
                starter=starter,
                console=self._console,
                stops=self._stops,
                link=self._link,
                restarts=restarts,
                stop_grace_s=self._stop_grace_s,
                check_disk_space=self._logs.check_disk_space,
                on_started=lambda pids: self._entry.write(_process_rows(layout, facts, pids)),
                on_hang=self._note_hang,
                hang=self._hang_watch(request, layout),
                on_slow=self._note_slow,
                slow=SlowWatch(self._options.slow_share, has_other_hosts=request.nodes.is_multi_node),
            )
            try:
                trial.start(stage.store)
                stage.release_sockets(keep_endpoints=restarts > 0)
                if attempt == 0 and layout.local:
                    self._log_topology(layout, facts)
                return trial.wait()
            finally:
                self._restarts -= restarts - trial.restarts
                if request.elastic is not None and self._budget.total is not None:
                    self._restarts = self._budget.total

    def _elastic_attempt(self) -> Callable[..., LocalAttempt]:
        """Return how to make an attempt whose ranks may change; whole restarts and replaced ranks share a budget."""
        from phalanx.launch.job.elastic_attempt import ElasticAttempt

        self._budget.total = None if self._options.replacements is None else self._restarts
        assert self._control is not None
        return partial(
            ElasticAttempt,
            place=self._place,
            budget=self._budget,
            per_rank_dir=self._options.per_rank_dir,
            control=self._control,
            publish=self._entry.write,
        )

    def _note_hang(self, verdict: Verdict | None) -> None:
        self._entry.write_hang(verdict)
        self._logs.record_hang(verdict)

    def _note_slow(self, losses: Losses, goodput: str) -> None:
        lines = lines_of(losses)
        self._entry.write_slow(lines)
        self._logs.record_slow(lines, goodput=goodput, losses=losses.to_json())

    def _hang_watch(self, request: LaunchRequest, layout: Topology) -> HangWatch:
        settings = HangSettings(after_s=self._options.hang_after_s, timeout_s=self._options.hang_timeout_s)
        host = layout.hostnames[layout.node_rank] if request.nodes.is_multi_node else ""
        return HangWatch(settings, self._link, host)

    def _starter(self, stage: attempt_resources.AttemptResources, attempt: int) -> Starter:
        log_dir = str(self._logs.path)
        layout = self._build_topology(stage, attempt, log_dir)
        facts = attempt_resources.facts(
            stage.request,
            self._options,
            layout,
            attempt=attempt,
            log_dir=log_dir,
            gloo_path=self._gloo_path,
            secret=self._secret,
        )
        return Starter(
            server=self._server,
            layout=layout,
            facts=facts,
            inherited=self._inherited,
            script=self._options.training_script,
            script_args=self._options.training_script_args,
            log_format=self._options.log_format,
            endpoints=stage.sockets(layout),
        )

    def _build_topology(self, stage: attempt_resources.AttemptResources, attempt: int, log_dir: str) -> Topology:
        request = stage.request
        offer = stage.offer(self._job_id, self._options, self._secret)
        if request.elastic is not None:
            self._place = self._meet(request, offer)
            return self._place.topology(log_dir, per_rank_dir=self._options.per_rank_dir)
        offers = [offer] if self._link is None else self._exchange(self._link, attempt, offer)
        return build_topology(
            offers,
            request.nodes.rank,
            request.endpoints,
            log_dir,
            ranks=request.ranks,
            per_rank_dir=self._options.per_rank_dir,
        )

    def _meet(self, request: LaunchRequest, offer: NodeOffer) -> ElasticStart:
        """Return this node's place in an elastic job; waits for other nodes where there may be some."""
        from phalanx.launch.job.elastic_meeting import ElasticMeeting, meeting_key
        from phalanx.launch.job.elastic_start import ElasticStart

        if not request.nodes.is_multi_node:
            return ElasticStart(request=request, offer=offer)
        meeting = ElasticMeeting(
            request=request,
            timeout_s=self._options.timeout_s,
            offer=offer,
            key=meeting_key(request.nodes, self._inherited),
        )
        if number := meeting.run(self._stops, self._server):
            raise InterruptedJobError(number)
        return ElasticStart(request=request, offer=offer, meeting=meeting)

    def _exchange(self, link: NodeLinkHandle, attempt: int, offer: NodeOffer) -> list[NodeOffer]:
        """Meet the other hosts; returns what each brings."""
        link.offer(attempt, offer)
        while (offers := link.offers(attempt)) is None:
            if number := self._stops.take():
                raise InterruptedJobError(number)
            readable, _, _ = select.select([link.socket, self._server.socket], [], [], POLL_S)
            if self._server.socket in readable:
                self._server.receive()
            if link.socket in readable:
                link.take()
        return offers

    def _join_link(self, request: LaunchRequest) -> NodeLinkHandle:
        """Start the process that talks to the other hosts."""
        ours, theirs = wire.pair()
        nodes, port = request.nodes, request.meeting_port
        fds = [theirs.fileno()]
        with theirs:
            meeting = None
            if nodes.rank == 0:
                meeting = machine.bind(nodes.address, port, flag="--http_port", listen=True)
                fds.append(meeting.fileno())
            self._server.spawn(
                "link",
                "link",
                fds,
                env={},
                cwd=os.getcwd(),
                log=f"{self._logs.path}/launcher.link",
                config={
                    "host": nodes.hosts[0],
                    "port": port,
                    "node_rank": nodes.rank,
                    "node_count": nodes.count,
                    "timeout_s": self._options.timeout_s,
                    "hosts": list(nodes.hosts),
                    "names": [nodes.name(rank) for rank in range(nodes.count)],
                },
            )
            if meeting is not None:
                meeting.close()
        logger.info("meeting %d hosts at %s:%d", nodes.count, nodes.hosts[0], port)
        return NodeLinkHandle(ours)

    def _log_topology(self, layout: Topology, facts: environment.JobFacts) -> None:
        for role in ROLES:
            processes = attempt_resources.local_processes(layout, role)
            if not processes:
                continue
            start = "Local start" if facts.mode == "collective" else f"Local {role} start"
            logger.info(
                "%s %d processes. First process distributed environment info (Only For Debug):",
                start,
                len(processes),
            )
            variables = environment.build(processes[0], layout, facts, self._inherited)
            self._console.write(report.environment_table(environment.table_rows(processes[0], facts.mode, variables)))
        logger.info(attempt_resources.log_hint(layout, facts.mode, facts.log_dir))


class InterruptedJobError(Exception):
    """The user or a scheduler ended the job before its processes started."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _process_rows(layout: Topology, facts: environment.JobFacts, pids: dict[str, int]) -> list[dict[str, Any]]:
    """What the registry tells about each process."""
    return [
        {
            "role": process.role,
            "rank": process.rank,
            "pid": pids[process.id],
            "log": process.log_file,
            "events": environment.events_file(process, facts.log_dir),
        }
        for process in layout.local
    ]
