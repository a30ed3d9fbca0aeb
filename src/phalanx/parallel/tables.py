"""Parameter-server calls of Fleet: run_server, stop_worker, save_persistables, load_persistables, shrink."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

import phalanx.comm.context as context_of
from phalanx.comm.agreement import agree
from phalanx.comm.context import Context
from phalanx.comm.transfers import check_not_alone
from phalanx.data.stream.stream_batches import digest
from phalanx.errors import ConfigError
from phalanx.files import file_lock
from phalanx.parallel.model_shape import is_handle, is_module_held
from phalanx.parallel.session import applied_to, distributed_models, session
from phalanx.plan.rules.servers import dense_on_servers, push_from_strategy
from phalanx.plan.value import Average
from phalanx.ps.client import table_client
from phalanx.ps.client.connect import secret_of
from phalanx.ps.client.leased_batches import LeasedBatches
from phalanx.ps.client.table_client import TableClient
from phalanx.ps.snapshot.manifest import MANIFEST, read_manifest
from phalanx.ps.snapshot.read import open_snapshot
from phalanx.ps.stores.base import TableStore
from phalanx.ps.stores.local import LocalStore
from phalanx.strategy import DistributedStrategy

logger = logging.getLogger("phalanx.ps")


def tables_of(context: Context, strategy: DistributedStrategy) -> TableClient:
    """Return what ties this worker to its tables.

    Args:
        context: The job.
        strategy: Settings for the mode, unless a model's Plan has said it.
    """
    servers, tables = len(context.role.server_endpoints), table_client.current()
    session.is_in_table = table_client.holds
    if not tables.is_configured:
        tables.configure(push_from_strategy(strategy, servers), dense=dense_on_servers(strategy, servers))
    if context.role.least_workers and servers:
        tables.leave_on_sigterm()
        if context.batch_source is None:  # it numbers the loaders of the whole script
            context.batch_source = LeasedBatches(tables, context.rank)
    return tables


def serve(load: Path | None = None, names: Sequence[str] | None = None) -> None:
    """Hold tables until all workers have left.

    Args:
        load: Folder of a snapshot to start from.
        names: Tables to load of it; all when None.

    Raises:
        PeerLostError: If workers vanished.
    """
    from phalanx.ps.server.main import run  # only servers need it

    role = context_of.init().role
    run(role, secret=secret_of(role), load=load, names=names)


def finish() -> None:
    """Send what is held back and leave the servers. Safe to call twice."""
    table_client.current().finish()


def save(directory: Path, mode: str) -> None:
    """Write tables and dense parameters at one moment, unless the folder holds them as they are now.

    Not collective; workers that call it at once take turns. Without tables any one worker writes the models.

    Args:
        directory: Folder of the snapshot.
        mode: As `TableStore.save` takes it.

    Raises:
        ConfigError: If the folder cannot be made, or a job without servers holds a model in parts.
    """
    tables = table_client.current()
    store = _store_of(tables, f"fleet.save_persistables({str(directory)!r})")
    with _alone_in(directory):
        store.flush()
        models = [model.state_dict() for model in distributed_models()]
        counts = {name: [table.rows, table.pushed] for name, table in store.report().items()}
        # Pushes change with every step, and where nothing is pushed the models themselves do.
        counts = counts or {"models": [digest(models)]}
        if _is_saved(directory, mode, counts, tables.since):
            logger.info("%s holds this moment already: another worker saved it", directory)
            return
        store.save(directory, {"models": models, "counts": counts}, mode=mode)


def load(directory: Path, names: Sequence[str] | None) -> None:
    """Replace tables, and with `names=None` dense parameters, by those of a snapshot. Collective.

    Tables that only the model or only the snapshot has stay as they are; the log names them.

    Raises:
        ConfigError: If the folder holds no snapshot, or the dense parameters of other models.
        PeerLostError: If a worker was started again alone, here and on the others.
    """
    check_not_alone("fleet.load")
    tables = table_client.current()
    extra: dict[str, Any] = open_snapshot(directory).extra()
    # Nobody may continue training while another still loads, nor may a second load undo what was trained.
    agree("load", [str(directory), list(names) if names is not None else None])
    has_tables = _has_tables(tables)
    if has_tables:
        tables.load(directory, names)
    else:
        _require_whole(f"fleet.load({str(directory)!r})")
    agree("loaded", True)
    if names is not None:
        return
    _say_what_stays(directory)
    models = list(distributed_models())
    if len(models) != len(extra["models"]):
        raise ConfigError(
            f"{directory} holds the dense parameters of {len(extra['models'])} models, and this script distributed "
            f"{len(models)}. Distribute the same models first, or name the tables to load."
        )
    for model, state in zip(models, extra["models"], strict=True):
        model.load_state_dict(state)
    if has_tables:
        tables.registry.settle_dense(directory)


def shrink() -> int:
    """End a day of every table; returns rows dropped. Acts on worker 0, and returns 0 on others."""
    tables = table_client.current()
    if context_of.current().rank or not _has_tables(tables):
        return 0
    tables.mode.flush()
    return sum(tables.mode.store.shrink(name) for name in tables.registry.tables)


def _has_tables(tables: TableClient) -> bool:
    """Return whether there may be a table: in a job of several workers without servers, whether a model has one."""
    role = tables.context.role
    if role.worker_num == 1 or role.server_endpoints or tables.registry.tables:
        return True
    return any(is_handle(param) for model in distributed_models() for param in model.parameters())


def _store_of(tables: TableClient, call: str) -> TableStore:
    """Return what holds this job's tables; where there is none, an empty one beside which models are saved."""
    if _has_tables(tables):
        return tables.mode.store
    _require_whole(call)
    return LocalStore()


def _require_whole(call: str) -> None:
    """Raise unless every worker of this job without tables holds the same whole models."""
    for model in distributed_models():
        applied = applied_to(model)
        parts = [
            name
            for name, param in model.named_parameters()
            if param.is_meta or isinstance(param, DTensor) or is_module_held(param)
        ]
        is_apart = applied is not None and any(isinstance(rule.update, Average) for rule in applied.plan.params)
        if parts or is_apart:
            reason = f"{parts[0]!r} is cut over ranks" if parts else "ranks train apart between two averages"
            raise ConfigError(
                f"{call} writes and reads whole models by each worker for itself, and {reason}. Call px.save(folder, "
                "model, optimizer) and px.load on all ranks, or px.export_state_dict(model, path) for one file."
            )


def _say_what_stays(directory: Path) -> None:
    """Warn of tables that only the models or only the snapshot has: a renamed one begins anew, unseen."""
    saved = {name for name, spec in read_manifest(directory).tables.items() if not spec.dense}
    params = [param for model in distributed_models() for param in model.parameters()]
    ours = {str(param.table) for param in params if is_handle(param)}
    if ours - saved:
        logger.warning(
            "%s has no rows of %s, which stay as they are; it has %s", directory, _list(ours - saved), _list(saved)
        )
    if saved - ours and ours:
        logger.warning("%s also has rows of %s, which no distributed model uses", directory, _list(saved - ours))


def _list(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "no table"


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Make a folder, and hold its lock."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"save: the folder {str(directory)!r} cannot be made: {error.strerror}. Name one that this worker "
            "and all servers can write to."
        ) from None
    with file_lock(directory, lambda: logger.info("save: waiting until another worker has saved to %s", directory)):
        yield


def _is_saved(directory: Path, mode: str, counts: dict[str, list[int]], since: float) -> bool:
    """Return whether a worker of this job has saved exactly this to the folder."""
    path = directory / MANIFEST
    if not path.exists() or path.stat().st_mtime < since:
        return False
    manifest = read_manifest(directory, check_files=False)
    return manifest.mode == mode and manifest.extra.get("counts") == counts
