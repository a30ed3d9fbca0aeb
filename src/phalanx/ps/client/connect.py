"""`open_consistency`: connect a worker to the parameter servers, in the consistency mode of the Plan."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

from phalanx.cluster.env.environment import Environment
from phalanx.cluster.network import is_loopback
from phalanx.cluster.role.role import Role
from phalanx.cluster.runtime_folder import own_secret
from phalanx.comm.context import Context
from phalanx.errors import ConfigError
from phalanx.plan.value import Push
from phalanx.ps.client.consistency import AsyncMode, ConsistencyMode, HalfAsyncMode
from phalanx.ps.client.geo import GeoMode
from phalanx.ps.stores.base import ServerMode, TableStore
from phalanx.ps.stores.local import LocalStore
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.wire.data_frame import ValueType

logger = logging.getLogger("phalanx.ps")


def open_consistency(
    context: Context, push: Push, *, dense: Literal["servers", "workers"] = "servers"
) -> ConsistencyMode:
    """Connect to the job's servers, or hold the tables here when the job is this one process; log what holds then.

    Args:
        context: Who this worker is.
        push: Mode and its steps.
        dense: Where dense parameters live, for the log.

    Raises:
        ConfigError: If several workers have no server, or the job's secret is not set.
        PeerLostError: If a server does not come; names it.
    """
    role = context.role
    mode = _mode(_store(role, push), push, role.worker_num)
    for line in contract(push, workers=role.worker_num, servers=len(role.server_endpoints), dense=dense):
        logger.info("%s", line)
    return mode


def contract(push: Push, *, workers: int, servers: int, dense: Literal["servers", "workers"]) -> list[str]:
    """Say where parameters live and how stale rows can be. Pure."""
    if not servers:
        return ["parameter server: tables and dense parameters are in this process; nothing is stale"]
    every = "the worker" if workers == 1 else f"all {workers} workers"
    what = {
        "sync": f"rows are those of the step before, never stale; every step waits for {every}",
        "async": "gradients are applied as they come; a row lacks what other workers push between read and update, "
        "without a bound",
        "bounded": f"gradients are applied as they come; a worker is never more than {push.steps} steps ahead of the "
        "slowest",
        "half_async": f"a worker sends the sum of {push.steps} steps; a row lacks up to {push.steps} steps of its own "
        "and what other workers did not send yet",
        "geo": f"a worker trains a copy and sends its difference / {workers} every {push.steps} steps; a row lacks up "
        f"to {push.steps} steps of every other worker",
    }[push.mode]
    lives = "on the servers, as stale as rows" if dense == "servers" else "on every worker, equal by all-reduce"
    if workers == 1 and dense == "workers":
        lives = "in this process"
    lines = [
        f"parameter server: mode {push.mode}, {_count(workers, 'worker')}, {_count(servers, 'server')}: {what}",
        f"parameter server: dense parameters live {lives}",
    ]
    if push.wire_dtype == "bfloat16":
        lines.append("parameter server: rows and gradients are rounded to bfloat16 on their way; servers keep float32")
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def secret_of(role: Role) -> bytes:
    """Return what servers and workers of the job prove to each other.

    Where all servers are on loopback and nobody set a secret, it is one that only this user can read.

    Raises:
        ConfigError: If other hosts can reach a server, and no secret is set.
    """
    if role.secret:
        return role.secret
    if all(is_loopback(endpoint.rpartition(":")[0]) for endpoint in role.server_endpoints):
        return bytes.fromhex(own_secret())
    raise ConfigError(
        f"the servers at {', '.join(role.server_endpoints)} can be reached from other hosts, and PHALANX_JOB_SECRET is "
        "not set. `phalanx run` sets it on one host; otherwise set it to the same 64 hexadecimal digits for every "
        "server and worker, made by `openssl rand -hex 32`."
    )


def report_unused(role: Role, *, failed: bool, connect_s: float) -> None:
    """Tell the servers that this worker ends and has used no table: they need not wait for it.

    Args:
        role: Who this worker is.
        failed: Whether its script failed; the servers and the other workers then count it as lost.
        connect_s: Seconds for a server to come up.

    Raises:
        PeerLostError: If a server does not come; names it.
    """
    store = _remote(role, None, 0, connect_s)
    try:
        store.declare([])
        if not failed:
            store.leave()
    finally:
        store.close()


def _store(role: Role, push: Push) -> TableStore:
    if not role.server_endpoints:
        if role.worker_num > 1:
            raise ConfigError(
                f"{role.worker_num} workers share tables, but the job has no parameter server. Launch with "
                f"`phalanx run --server-num 1 --worker-num {role.worker_num} train.py`."
            )
        return LocalStore()
    mode: ServerMode = "sync" if push.mode == "sync" else "bounded" if push.mode == "bounded" else "async"
    return _remote(role, mode, push.steps or 0 if mode == "bounded" else 0, wire_dtype=push.wire_dtype)


def _remote(
    role: Role, mode: ServerMode | None, bound: int, connect_s: float = 60.0, wire_dtype: ValueType = "float32"
) -> RemoteStore:
    settings = Environment(os.environ)
    layout_file = settings.text("PHALANX_SERVER_LAYOUT")
    return RemoteStore(
        role.server_endpoints,
        secret=secret_of(role),
        worker=role.rank,
        workers=role.worker_num,
        mode=mode,
        bound=bound,
        connect_s=connect_s,
        retry_s=settings.seconds("PHALANX_SERVER_RETRY_S"),
        wire_dtype=wire_dtype,
        layout_file=Path(layout_file) if layout_file else None,
    )


def _mode(store: TableStore, push: Push, workers: int) -> ConsistencyMode:
    steps = push.steps or 1
    if push.mode == "half_async":
        return HalfAsyncMode(store, steps=steps)
    if push.mode == "geo":
        return GeoMode(store, steps=steps, workers=workers, local_optimizer=push.local_optimizer)
    # Without servers there is nothing to wait for, so nothing is read ahead.
    return AsyncMode(store) if push.mode == "async" and isinstance(store, RemoteStore) else ConsistencyMode(store)
