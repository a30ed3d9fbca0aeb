"""`ServerScaling`: change how many parameter servers a job of this host has, while its workers train."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cluster.role.role import LAYOUT_FILE
from phalanx.errors import LaunchError
from phalanx.i18n import Labels, tr
from phalanx.launch.job.start import Starter
from phalanx.launch.process.environment import JobFacts, layout_folder, status_file
from phalanx.launch.request import machine
from phalanx.launch.request.topology import Process, Topology, with_servers

if TYPE_CHECKING:
    from phalanx.launch.job.servers.hand_over import HandOver

logger = logging.getLogger("phalanx.launch")

MOST_SERVERS = 1024
"""As many as a table has shards."""

_SPARE_FILES = 64
"""Open files that the launcher has need of beside a socket of each new server and a connection to each old one."""

_PHASES: Labels = {
    "stop": "the servers finish the pushes under way",
    "write": "the servers write their tables",
    "load": "the new servers read them",
    "ready": "the new servers have them",
    "end": "the old servers end",
    "continue": "the old servers continue",
}
"""How far a change is; the first four are phases of a `HandOver`."""


@dataclass(kw_only=True)
class _Change:
    """One change of the number of servers."""

    before: Starter
    after: Starter
    hand_over: HandOver
    sockets: ExitStack
    """Those of the new servers, until they are the job's."""

    since: float = field(default_factory=time.monotonic)
    is_started: bool = False
    is_committed: bool = False
    running: set[str] = field(default_factory=set)
    """Ids of servers that are none of the job's: the new ones before the commit, the old ones after it."""

    deletion: threading.Thread | None = None

    @property
    def failure(self) -> str:
        """Why it is given up; empty where it is not."""
        return "" if self.is_committed else self.hand_over.failure

    @property
    def counts(self) -> tuple[int, int]:
        """Servers before and after."""
        return self.before.layout.count("server"), self.after.layout.count("server")


@dataclass(kw_only=True)
class ServerScaling:
    """Starts other servers than the job has, and puts them in their place once they have the tables.

    Until the commit the servers there are may continue at any time. `HandOver` does what is done over the wire.
    """

    starter: Starter
    """Of the servers that the job has."""

    start: Callable[[Process, Starter], None]
    """Starts a process."""

    send: Callable[[Sequence[str], int], None]
    """Sends a signal to processes, by their ids."""

    adopt: Callable[[Starter], None]
    """Called at the commit: the job's servers are those of this starter. Others of its processes are the same."""

    has_workers: Callable[[], bool]
    """Whether there are workers that train."""

    record: Callable[[dict[str, Any]], None]
    """Takes the event of a change."""

    publish: Callable[[str], None] = lambda line: None
    """Called with how far a change is, in words, and "" when it is over."""

    _sockets: ExitStack = field(default_factory=ExitStack)
    """Those of servers that came to the job by a change."""

    _change: _Change | None = None
    _progress: str = ""
    _outcome: dict[str, Any] = field(default_factory=dict)

    def begin(self, count: object, obstacle: str = "") -> str:
        """Begin to change the number of servers; returns what follows, in words.

        Args:
            count: How many there are to be.
            obstacle: What is in the way now; empty for nothing.

        Raises:
            LaunchError: If the job cannot have so many servers, or none others at all, or something is in the way.
        """
        layout, facts = self.starter.layout, self.starter.facts
        _check_job(layout, facts)
        before = layout.count("server")
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_SERVERS:
            raise LaunchError(
                tr("{count!r} servers were asked for. Give a number from 1 to {most}.", count=count, most=MOST_SERVERS)
            )
        if count == before:
            raise LaunchError(tr("The job has {count} servers already.", count=before))
        if self._change is not None:
            raise LaunchError(self.busy)
        if obstacle:
            raise LaunchError(obstacle)
        if not self.has_workers():
            raise LaunchError(tr("The workers of this job have left, and its servers end. There is nothing to change."))
        try:
            self._change, self._outcome = self._prepare(count), {}
        except (OSError, RuntimeError) as error:  # no file, or no thread, is left
            raise LaunchError(
                tr(
                    "{count} servers cannot be started beside those there are ({why}). Ask again when there is room.",
                    count=count,
                    why=error,
                )
            ) from None
        logger.info("phalanx scale-servers: %d servers instead of %d", count, before)
        self._report()
        return tr("{before} servers -> {after} servers", before=before, after=count)

    @property
    def busy(self) -> str:
        """Why nothing else can be done with the servers; empty where no change is under way."""
        why = tr("The number of servers is being changed: {progress}. Wait until that is over.", progress=self.progress)
        return why if self._change else ""

    @property
    def progress(self) -> str:
        """How far a change is; empty where none is under way."""
        change = self._change
        if change is None:
            return ""
        if change.is_committed:
            return tr(_PHASES["end"])
        if change.failure:
            return tr(_PHASES["continue"])
        return tr(_PHASES[change.hand_over.phase.value])

    @property
    def outcome(self) -> str:
        """What came of the last change, as a JSON object; `{}` before the first is over."""
        return json.dumps(self._outcome)

    def poll(self) -> None:
        """Continue with what is under way. Called every few moments."""
        change = self._change
        if change is None:
            return
        if change.is_committed or change.failure:
            self._end(change)
        elif change.hand_over.phase.value == "load" and not change.is_started:
            change.is_started = True
            for process in _servers(change.after.layout):
                change.running.add(process.id)
                self.start(process, change.after)
        elif change.hand_over.phase.value == "ready":
            self._commit(change)
        self._report()

    def take_end(self, process: Process, ended: str, *, failed: bool) -> bool:
        """Return whether a process that ended was none of the job's: a new server before the commit, an old one after.

        Before the commit the end of any other server, or of a worker that failed, gives the change up.
        """
        change = self._change
        if change is None:
            return False
        is_spare = process.id in change.running
        change.running.discard(process.id)
        if not change.is_committed and (failed or process.role == "server"):
            name = tr("new {process}", process=process.title) if is_spare else process.title
            lost_worker = process.rank if process.role == "worker" else None
            why = tr("{process} {ended}; read {log}", process=name, ended=ended, log=process.log_file)
            change.hand_over.give_up(why, lost_worker)
        return is_spare

    def stop(self) -> None:
        """Give up a change under way: the attempt ends, and every process with it.

        New servers end at once, for workers are to continue with the old ones, and leave.
        """
        change = self._change
        if change is not None and not change.is_committed:
            change.hand_over.stop(tr("the job ends"))
            self.send([*change.running], signal.SIGKILL)
            change.sockets.close()
        self._sockets.close()

    def delete_rest(self) -> None:
        """Delete what a change that was under way at `stop` has left; all processes have ended."""
        if self._change is not None:
            _delete(self._change)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _prepare(self, count: int) -> _Change:
        from phalanx.launch.job.servers.hand_over import HandOver  # of which few jobs have need

        layout, facts = self.starter.layout, self.starter.facts
        _check_open_files(layout.count("server"), count)
        number = facts.server_layout + 1
        folder = Path(layout_folder(str(Path(facts.server_layout_file).parent), number))
        _move_aside(folder)
        address = layout.endpoints["server"][0].rpartition(":")[0]
        with ExitStack() as opened:
            sockets = [opened.enter_context(machine.bind(address, 0, flag="servers: port")) for _ in range(count)]
            endpoints = [f"{address}:{sock.getsockname()[1]}" for sock in sockets]
            after = replace(
                self.starter,
                layout=with_servers(layout, endpoints, number, facts.log_dir),
                facts=replace(facts, server_dir=str(folder), server_layout=number),
                endpoints=self._sockets_after(sockets, number),
            )
            hand_over = HandOver(
                layout.endpoints["server"],
                endpoints,
                secret=bytes.fromhex(facts.secret),
                job=layout.job_id,
                workers=layout.count("worker"),
                folder=folder,
            )
            return _Change(before=self.starter, after=after, hand_over=hand_over, sockets=opened.pop_all())

    def _sockets_after(self, sockets: Sequence[socket.socket], number: int) -> dict[str, socket.socket]:
        old = {process.id for process in _servers(self.starter.layout)}
        others = {name: bound for name, bound in self.starter.endpoints.items() if name not in old}
        return others | {f"server.{rank}.{number}": bound for rank, bound in enumerate(sockets)}

    def _commit(self, change: _Change) -> None:
        try:
            publish_servers(change.after.layout, change.after.facts)
        except LaunchError as error:
            change.hand_over.give_up(str(error))
            return
        change.is_committed = True
        change.hand_over.commit()
        seconds = time.monotonic() - change.since
        self._sockets = change.sockets
        self.starter = change.after
        old = [process.id for process in _servers(change.before.layout)]
        change.running = set(old)
        self.adopt(change.after)
        self.send(old, signal.SIGKILL)
        for name in old:
            # A worker that asks there again is refused at once.
            change.before.endpoints[name].close()
        before, after = change.counts
        line = f"{after} servers instead of {before}, {seconds:.1f} s after the command"
        logger.info("the job has %s", line)
        facts_of = {"before": before, "servers": after, "seconds": round(seconds, 3)}
        self.record({"time": round(time.time(), 3), "kind": "servers", **facts_of, "reason": line})

    def _end(self, change: _Change) -> None:
        """End what is left of a change, once its thread and processes are."""
        if change.failure and change.running:
            self.send([*change.running], signal.SIGKILL)
        if change.running or not change.hand_over.is_over:
            return
        if change.deletion is None:
            change.deletion = threading.Thread(target=_delete, args=(change,), name="delete", daemon=True)
            change.deletion.start()
        if change.deletion.is_alive():
            return
        before, after = change.counts
        self._outcome = {"before": before, "servers": after}
        if change.failure:
            self._outcome = {"before": before, "servers": before, "error": change.failure}
            change.sockets.close()
            logger.warning("phalanx scale-servers: the job keeps its %d servers: %s", before, change.failure)
        self._change = None

    def _report(self) -> None:
        if self.progress != self._progress:
            self._progress = self.progress
            before, after = self._change.counts if self._change else (0, 0)
            line = tr("{before} servers -> {after} servers", before=before, after=after)
            self.publish(f"{line}: {self._progress}" if self._progress else "")


def publish_servers(layout: Topology, facts: JobFacts) -> None:
    """Write which servers the job has to where workers and followers of their logs look.

    While their number has never changed, nothing says so there: what an earlier job wrote is deleted.

    Raises:
        LaunchError: If the disk does not take it.
    """
    if not facts.server_dir:
        return
    path = Path(facts.server_layout_file or f"{facts.server_dir}/{LAYOUT_FILE}")
    try:
        if not facts.server_layout:
            path.unlink(missing_ok=True)
            return
        from phalanx.ps.wire.client.server_layout import ServerLayout

        endpoints = layout.endpoints["server"]
        ServerLayout(facts.server_layout, endpoints, Path(facts.server_dir).name).write(path)
    except OSError as error:
        raise LaunchError(
            tr(
                "{path} cannot be written ({why}). Check the space and the permissions there.",
                path=path,
                why=error.strerror,
            )
        ) from None


def _check_job(layout: Topology, facts: JobFacts) -> None:
    if not facts.server_layout_file or not facts.max_restarts or layout.count("heter_worker"):
        raise LaunchError(
            tr(
                "The number of servers of this job cannot be changed. It can be where all processes are on one host, "
                "and the job was started with --max-restarts 1, or more, --server-num and --worker-num; not with "
                "--servers or heter workers."
            )
        )


def _check_open_files(before: int, count: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + before + count + _SPARE_FILES
    if limit < needed:
        raise LaunchError(
            tr(
                "{count} servers beside {before} need {needed} open files, and the launcher may have {limit}. Ask for "
                "fewer, or start the job with a higher ulimit -n.",
                count=count,
                before=before,
                needed=needed,
                limit=limit,
            )
        )


def _servers(layout: Topology) -> list[Process]:
    return [process for process in layout.local if process.role == "server"]


def _move_aside(folder: Path) -> None:
    """Keep what an earlier job left in a folder."""
    aside = folder.with_name(f"{folder.name}.previous")
    try:
        if folder.exists():
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
    except OSError as error:
        raise LaunchError(
            tr("{path} is in the way ({why}). Remove it, and ask again.", path=folder, why=error.strerror)
        ) from None


def _delete(change: _Change) -> None:
    """Delete what servers that have ended, or never came to the job, have left."""
    gone = change.after if change.failure else change.before
    processes, folder = _servers(gone.layout), Path(gone.facts.server_dir)
    for left in [folder] if gone.facts.server_layout else [folder / str(process.rank) for process in processes]:
        shutil.rmtree(left, ignore_errors=True)
    for process in processes:
        Path(status_file(process, gone.facts.log_dir)).unlink(missing_ok=True)
