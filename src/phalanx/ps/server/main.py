"""`run`: entry of a parameter server: listen, recover, serve until all workers have left."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from phalanx.cluster.cgroup import ControlGroups
from phalanx.cluster.env.environment import Environment
from phalanx.cluster.proc import total_bytes
from phalanx.cluster.role.role import Role
from phalanx.errors import PeerLostError, PhalanxError, RoleError
from phalanx.ps.server.clocks import Clocks
from phalanx.ps.server.log import Durability
from phalanx.ps.server.recovery import Recovery
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_check import SnapshotTableCheck
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.server.status import StatusFile
from phalanx.ps.wire.address import listening_sockets
from phalanx.ps.wire.progress import Startup, WorkProgress, WorkReporter
from phalanx.ps.wire.server.listener import Listener

TICK_S = 0.2
GRACE_S = 2.0
"""How long a worker's connection may be gone before the worker is lost."""

LOST_WORKER_GRACE_S = 10.0
"""How long a server continues after a worker is lost, so that the others hear who it was."""

JOIN_TIMEOUT_S = 1800.0
"""How long a server waits for workers that never came, where no launcher of ours sees that one ended;
PHALANX_COLLECTIVE_TIMEOUT_S sets another time, as it does for workers that wait for each other."""

REPORT_S = 60.0
RECOVERY_LOG_S = 30.0

logger = logging.getLogger("phalanx.ps")


def run(
    role: Role,
    *,
    secret: bytes,
    directory: str | Path | None = None,
    load: str | Path | None = None,
    names: Sequence[str] | None = None,
    log_bytes: int = 256 << 20,
) -> None:
    """Serve tables until every worker has left and no client is connected.

    SIGTERM ends it too: well when all workers have left, else as it ends any process, so that whoever started this one
    sees that it was too early. What was answered is in the log. SIGUSR1 has a server that keeps its state write a base
    first, and then ends it in the same way: whoever starts it again need not wait for a log.

    Args:
        role: This server's place in the job.
        secret: The job's secret.
        directory: Where this server keeps its state, for a restart; `PHALANX_SERVER_DIR` when None.
        load: Folder of a snapshot that tables start from.
        names: Tables to take from it; all when None.
        log_bytes: Size of the log at which a new base snapshot is written; see `Recovery`.

    Raises:
        ConfigError: If the endpoint is taken, or `load` holds no snapshot.
        DataError: If the state or the snapshot is broken; names file and offset.
        PeerLostError: If a worker went without leaving, or never came, and workers are not started again.
        PhalanxError: If this server failed so that it cannot continue.
    """
    # Where workers wait for a server that was started again, servers wait for a worker.
    settings = Environment(os.environ)
    restarts = settings.seconds("PHALANX_SERVER_RETRY_S") > 0
    is_watched = restarts or role.launcher == "phalanx"
    join_timeout_s = math.inf if is_watched else settings.seconds("PHALANX_COLLECTIVE_TIMEOUT_S") or JOIN_TIMEOUT_S
    service = Service(role.rank, role.world_size)
    service.budget = settings.integer("PHALANX_SERVER_MAX_BYTES", minimum=1) or default_budget()
    snapshots = SnapshotService(service)
    recovery = _make_recovery(service, snapshots, directory, log_bytes)
    startup = Startup(_make_progress(role.rank))
    listener = Listener(
        listening_sockets(role.endpoint, secret, _bound_socket()),
        secret=secret,
        me=f"server {role.rank}",
        handler=service.handle,
        data_handler=service.engine,
        opened=service.connected,
        closed=service.disconnected,
        startup=startup,
    )
    state = f"state in {recovery.directory}" if recovery else "state in memory only"
    logger.info("server %d of %d at %s: %s", role.rank, role.world_size, listener.endpoint, state)
    thread = threading.Thread(target=listener.serve, name="listener", daemon=True)
    thread.start()
    try:
        with startup:
            service.state.progress = startup.progress
            if load is not None:
                snapshots.add_source(Path(load), names)
            if recovery is not None:
                recovery.recover(role.job_id)
            snapshot_check = _make_snapshot_check(service, names) if load is not None else None
        status = StatusFile(service, settings.text("PHALANX_STATUS_FILE"))
        # Where workers come and go the launcher says which are gone, and when no more will come.
        grace_s = 0.0 if restarts or role.least_workers else GRACE_S
        may_come = role.least_workers > 0
        watch(service, recovery, grace_s, snapshot_check, JoinTimeout(join_timeout_s), status, may_come=may_come)
    finally:
        service.stop()
        listener.stop()
        thread.join()
        snapshots.stop()
        if recovery is not None:
            recovery.close()


class JoinTimeout:
    """Ends a server that waits for workers which never came: a worker that was killed tells nobody.

    Args:
        limit_s: Seconds since the start, or since the last worker that came.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._missing: list[int] | None = None
        self._since = time.monotonic()

    def check(self, clocks: Clocks | None) -> bool:
        """Return whether workers that never came count as lost now.

        Raises:
            PeerLostError: If no worker at all came.
        """
        missing, now = None if clocks is None else clocks.missing, time.monotonic()
        if missing != self._missing:
            self._missing, self._since = missing, now
        if missing == [] or now - self._since < self._limit_s:
            return False
        if clocks is None:
            raise PeerLostError(
                f"No worker came to its first table in the {self._limit_s:g} s since this server started. Read the "
                "workers' logs for why; if they start later, set PHALANX_COLLECTIVE_TIMEOUT_S for the servers."
            )
        clocks.lose_missing(self._limit_s, now)
        return True


def watch(
    service: Service,
    recovery: Recovery | None,
    grace_s: float,
    snapshot_check: SnapshotTableCheck | None,
    join_timeout: JoinTimeout,
    status: StatusFile,
    *,
    may_come: bool = False,
) -> None:
    """Return when the server is to end; raises if it is because a worker is lost.

    Where workers `may_come` when all have left, it ends by SIGTERM alone.
    """
    reported, last = time.monotonic(), ""
    with _EndSignals() as ends:
        while not service.stopped.wait(TICK_S):
            clocks = service.state.clocks
            status.tick()
            _compare_tables(service, snapshot_check)
            # One that left may still evaluate or save, and another may come.
            is_over = ends.seen or not (may_come or service.is_connected)
            if clocks is not None and not clocks.live and is_over:
                logger.info("server %d: all workers have left", service.state.server)
                _say_untrained(service)
                _compare_tables(service, snapshot_check, has_ended=True)
                ends.after = signal.SIG_IGN
                return
            ends.obey(recovery if clocks is not None else None)
            has_timed_out = join_timeout.check(clocks)
            if clocks is not None:
                if has_timed_out or (grace_s and clocks.expire(time.monotonic(), grace_s)):
                    _wait_for_others(service)
                    clocks.check()
                if recovery is not None:
                    recovery.tick()
            if time.monotonic() - reported >= REPORT_S:
                reported, line = time.monotonic(), summary(service)
                if line != last:
                    logger.info("%s", line)
                last = line
    if service.failure is not None:
        raise service.failure


def _say_untrained(service: Service) -> None:
    if batches := service.state.batch_leases.returned:
        listed = ", ".join(f"{batch.number} of epoch {batch.epoch}" for batch in batches)
        logger.warning("nobody trained %d batches that lost workers had: %s", len(batches), listed)


def _compare_tables(service: Service, snapshot_check: SnapshotTableCheck | None, *, has_ended: bool = False) -> None:
    clocks = service.state.clocks
    if snapshot_check is None or clocks is None:
        return
    # The list is made at once: a worker may declare one more meanwhile.
    snapshot_check.compare([table.spec for table in list(service.state.tables.tables.values())], clocks.complete)
    if has_ended:
        snapshot_check.end()


def _wait_for_others(service: Service) -> None:
    """Wait until the other workers have gone too: each gets an error that names the one that is lost."""
    assert service.state.clocks is not None
    until = time.monotonic() + LOST_WORKER_GRACE_S
    while time.monotonic() < until and service.state.clocks.live - service.state.clocks.disconnected:
        time.sleep(TICK_S)


def summary(service: Service) -> str:
    """Return one line of counts."""
    if service.state.clocks is None:
        return f"server {service.state.server}: waiting for the first worker"
    tables = service.state.tables.report().values()
    rows, size = sum(t["rows"] for t in tables), sum(t["bytes"] for t in tables)
    pushed, dropped = sum(t["pushed"] for t in tables), sum(t["dropped"] for t in tables)
    steps = service.state.clocks.steps
    log = f", log {service.log.bytes / 2**20:,.0f} MiB" if service.log else ""
    return (
        f"server {service.state.server}: {len(tables)} tables, {rows:,} rows, {size / 2**20:,.0f} MiB; {pushed:,} rows "
        f"pushed, {dropped:,} not admitted; steps of the workers {steps}{log}"
    )


def _make_recovery(
    service: Service, snapshots: SnapshotService, directory: str | Path | None, log_bytes: int
) -> Recovery | None:
    directory = directory or os.environ.get("PHALANX_SERVER_DIR", "").strip()
    if not directory:
        return None
    return Recovery(service, snapshots, Path(directory), _durability(), log_bytes=log_bytes)


def _make_progress(server: int) -> WorkProgress:
    """Return the progress of a recovery, which the server's own log shows as well."""
    reporter = WorkReporter(lambda does, has_moved: logger.info("server %d %s", server, does), RECOVERY_LOG_S)
    return WorkProgress("recovers", reporter.report_if_due)


def _make_snapshot_check(service: Service, names: Sequence[str] | None) -> SnapshotTableCheck | None:
    """Return what compares the tables of workers with the folder; None where that is another's or was done before."""
    if service.state.server != 0 or service.state.clocks is not None:
        return None
    snapshot = service.state.sources[0].snapshot
    return SnapshotTableCheck(snapshot.directory, snapshot.tables, names)


def _durability() -> Durability:
    value = os.environ.get("PHALANX_SERVER_DURABILITY", "").strip() or "process"
    for durability in get_args(Durability):
        if value == durability:
            return durability  # type: ignore[no-any-return]
    raise RoleError(f"PHALANX_SERVER_DURABILITY must be process or disk, found {value!r}. Correct it or unset it.")


def _bound_socket() -> socket.socket | None:
    """Return the socket that the launcher bound for this process, if it did."""
    number = os.environ.get("PHALANX_ENDPOINT_FD", "")
    return socket.socket(fileno=int(number)) if number else None


class _EndSignals:
    """Notes SIGTERM and SIGUSR1 instead of dying of them at once, where the main thread runs the server."""

    def __init__(self) -> None:
        self.seen = False
        """Whether it was asked to end."""

        self.is_restart = False
        """Whether it was asked to end as one that is started again."""

        self.after: signal.Handlers = signal.SIG_DFL
        """What both do from then on. The launcher asks servers to end when the workers' processes have ended: one
        that is ending already need not be killed in the midst of what its script still does, and is if it takes long.
        """

    def __enter__(self) -> _EndSignals:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._see)
            signal.signal(signal.SIGUSR1, self._see_restart)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, self.after)

    def obey(self, recovery: Recovery | None) -> None:
        """Die of SIGTERM if a signal came; as one that is started again after a base."""
        if self.seen:
            logger.error("ended by SIGTERM before all workers had left")
        elif self.is_restart:
            if recovery is not None:
                _write_last_base(recovery)
            logger.info("ends to be started again")
        else:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _see(self, *_: object) -> None:
        self.seen = True

    def _see_restart(self, *_: object) -> None:
        self.is_restart = True


def _write_last_base(recovery: Recovery) -> None:
    """Write the state of a server that is about to end. Its log has all of it, too."""
    try:
        recovery.write_base()
    except (PhalanxError, OSError) as error:
        logger.warning("no base snapshot was written: %s", error)


def default_budget() -> int:
    """Return nine tenths of the memory that this process's control groups, or the host, have."""
    limit, _ = ControlGroups().memory_limit()
    total = total_bytes()
    return min(limit or total, total) * 9 // 10
