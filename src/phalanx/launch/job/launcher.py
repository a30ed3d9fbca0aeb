"""`Launcher`: the launcher of a node: detect hardware, check options, start processes, monitor, restart."""

from __future__ import annotations

import contextlib
import logging
import os
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
from phalanx.launch.elastic.joiners import RestartBudget
from phalanx.launch.hang.verdict import Verdict
from phalanx.launch.hang.watch import HangSettings, HangWatch
from phalanx.launch.job import attempt_resources, registry
from phalanx.launch.job.fork_server_handle import ForkServerHandle, ForkServerLostError
from phalanx.launch.job.local_attempt import STOP_GRACE_S, LocalAttempt
from phalanx.launch.job.meeting import exchange_offers, join_link, meet_elastic
from phalanx.launch.job.servers.scaling import publish_servers
from phalanx.launch.job.start import Starter
from phalanx.launch.job.start_messages import describe_threads, say_start, say_topology
from phalanx.launch.process import environment
from phalanx.launch.process.linux import StopSignals
from phalanx.launch.process.node_link_handle import NodeLinkHandle
from phalanx.launch.process.source_files import path_for_user
from phalanx.launch.reports import report
from phalanx.launch.reports.console import Console
from phalanx.launch.reports.logs import LogFolder
from phalanx.launch.reports.outcome import Outcome
from phalanx.launch.reports.root_cause import first_failure
from phalanx.launch.request import options_from_rank_table, options_from_scheduler
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.options import Options
from phalanx.launch.request.request import LaunchRequest, check_script, resolve
from phalanx.launch.request.topology import Topology, build_topology
from phalanx.launch.slow.stragglers import Losses
from phalanx.launch.slow.watch import SlowWatch
from phalanx.launch.slow.words import lines_of
from phalanx.versions import require_torch

if TYPE_CHECKING:
    from phalanx.launch.elastic.control import ControlSocket

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
        self._server_layout = 0
        """How often the number of servers has changed."""

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
        say_start(self._options, request, host, self._console, threads=threads, inherited=self._inherited)
        self._stops = StopSignals()
        self._logs = LogFolder(self._options.log_dir)
        runtime = self._runtime_folder()
        self._gloo_path = str(runtime / f"gloo-{self._job_id}")
        script = self._options.training_script
        with contextlib.ExitStack() as stack:
            if request.elastic is not None or request.workers is not None or self._can_restart_servers(request):
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

    def _can_restart_servers(self, request: LaunchRequest) -> bool:
        """Whether `phalanx restart-servers` may start processes of this job again, whatever restarts are left."""
        return request.mode == "ps" and self._options.max_restarts > 0

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

    def _fix_threads(self, request: LaunchRequest, host: Machine) -> list[str]:
        """Give each local process its share of the cores, before the libraries that read it are loaded; say which."""
        chosen = self._inherited.get("OMP_NUM_THREADS")
        threads = chosen or str(max(1, host.cores // max(1, request.local_processes)))
        environment = {"OMP_NUM_THREADS": threads, "PHALANX_LANG": language()}
        needed = preload.needed_by(self._options.training_script, is_elastic=request.elastic is not None)
        if request.nodes.is_multi_node:
            needed = needed or preload.TORCH  # of which the store is where launchers meet
        self._server.configure(environment, preload=needed)
        return describe_threads(self._options, request, host, threads, is_users=bool(chosen))

    def _run_attempts(self, request: LaunchRequest) -> int:
        if request.nodes.is_multi_node and request.elastic is None:
            log_dir = str(self._logs.path)
            self._link = join_link(self._server, request, timeout_s=self._options.timeout_s, log_dir=log_dir)
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
            request = self._with_servers(request)
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
            publish_servers(layout, facts)
            self._trial = trial = self._attempt_kind(request)(
                starter=starter,
                console=self._console,
                stops=self._stops,
                link=self._link,
                restarts=restarts,
                stop_grace_s=self._stop_grace_s,
                check_disk_space=self._logs.check_disk_space,
                on_started=lambda pids: self._entry.write(self._process_rows(pids)),
                on_servers=self._entry.write_servers,
                on_hang=self._note_hang,
                hang=self._hang_watch(request, layout),
                on_slow=self._note_slow,
                slow=SlowWatch(self._options.slow_share, has_other_hosts=request.nodes.is_multi_node),
                control=self._control,
            )
            try:
                trial.start(stage.store)
                keeps = restarts > 0 or request.workers is not None or self._can_restart_servers(request)
                stage.release_sockets(keep_endpoints=keeps)
                if attempt == 0 and layout.local:
                    say_topology(layout, facts, self._console, self._inherited, is_verbose=self._options.is_verbose)
                return trial.wait()
            finally:
                self._restarts -= restarts - trial.restarts
                self._server_layout = trial.facts.server_layout
                if request.elastic is not None and self._budget.total is not None:
                    self._restarts = self._budget.total

    def _with_servers(self, request: LaunchRequest) -> LaunchRequest:
        """Return the request of the next attempt: with as many servers as the last one ended with."""
        if not self._server_layout:
            return request
        return replace(request, counts={**request.counts, "server": self._trial.layout.count("server")})

    def _attempt_kind(self, request: LaunchRequest) -> Callable[..., LocalAttempt]:
        if request.elastic is not None:
            return self._elastic_attempt()
        return LocalAttempt if request.workers is None else self._workers_attempt(request)

    def _workers_attempt(self, request: LaunchRequest) -> Callable[..., LocalAttempt]:
        """Return how to make an attempt whose workers may come and go."""
        from phalanx.launch.elastic.workers.frozen_workers import PATIENCE_S
        from phalanx.launch.job.workers_attempt import WorkersAttempt

        self._budget.total = self._options.replacements
        assert request.workers is not None
        return partial(
            WorkersAttempt,
            limits=request.workers,
            budget=self._budget,
            patience_s=Environment(self._inherited).seconds("PHALANX_PATIENCE_S") or PATIENCE_S,
            publish=lambda pids, status: self._entry.write(self._process_rows(pids), status),
        )

    def _elastic_attempt(self) -> Callable[..., LocalAttempt]:
        """Return how to make an attempt whose ranks may change; whole restarts and replaced ranks share a budget."""
        from phalanx.launch.job.elastic_attempt import ElasticAttempt

        self._budget.total = None if self._options.replacements is None else self._restarts
        return partial(
            ElasticAttempt,
            place=self._place,
            budget=self._budget,
            per_rank_dir=self._options.per_rank_dir,
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
            server_layout=self._server_layout,
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
            self._place = meet_elastic(
                request,
                offer,
                self._stops,
                self._server,
                timeout_s=self._options.timeout_s,
                variables=self._inherited,
            )
            return self._place.topology(log_dir, per_rank_dir=self._options.per_rank_dir)
        offers = [offer]
        if self._link is not None:
            offers = exchange_offers(self._link, attempt, offer, self._stops, self._server)
        return build_topology(
            offers,
            request.nodes.rank,
            request.endpoints,
            log_dir,
            ranks=request.ranks,
            per_rank_dir=self._options.per_rank_dir,
        )

    def _process_rows(self, pids: dict[str, int]) -> list[dict[str, Any]]:
        """What the registry tells about each process."""
        log_dir = self._trial.facts.log_dir
        return [
            {
                "role": process.role,
                "rank": process.rank,
                "pid": pids[process.id],
                "log": process.log_file,
                "events": environment.events_file(process, log_dir),
                "status": environment.status_file(process, log_dir) if process.role == "server" else None,
            }
            for process in self._trial.layout.local
        ]
