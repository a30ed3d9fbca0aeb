"""`phalanx.fleet`: PaddlePaddle Fleet's API (`init`, `distributed_model`, `save_persistables`, ...).

from phalanx import fleet
fleet.init(is_collective=True)
optimizer = fleet.distributed_optimizer(optimizer)
model = fleet.distributed_model(model)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import phalanx.comm.context as context_of
from phalanx.cluster.role.role import Role
from phalanx.comm import agreement
from phalanx.comm.context import Context
from phalanx.comm.transfers import check_not_alone
from phalanx.errors import ConfigError, RoleError
from phalanx.old_names import missing
from phalanx.parallel import distribute as engine
from phalanx.parallel.old_words import with_old_words
from phalanx.parallel.session import session
from phalanx.strategy import DistributedStrategy, check_strategy

if TYPE_CHECKING:  # so that phalanx.comm, imported above, judges the installed torch first
    from torch import nn
    from torch.optim import Optimizer

    from phalanx.plan.value import Plan
    from phalanx.train.metrics import fleet as metrics

__all__ = [
    "DistributedStrategy",
    "barrier_worker",
    "distributed_model",
    "distributed_optimizer",
    "get_rank",
    "get_world_size",
    "init",
    "init_parallel_env",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load",
    "local_rank",
    "metrics",
    "prepare_context",
    "run_server",
    "save_inference_model",
    "save_persistables",
    "server_endpoints",
    "server_num",
    "shrink",
    "stop_worker",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]

P = ParamSpec("P")
R = TypeVar("R")
ModelT = TypeVar("ModelT", bound="nn.Module")
OptimizerT = TypeVar("OptimizerT", bound="Optimizer")


def init(
    role_maker: Role | None = None, is_collective: bool = False, strategy: DistributedStrategy | None = None
) -> Context:
    """Find out who this process is and meet the other ranks.

    Collective: every process of the job calls it. `python train.py` without a launcher is a job of one.

    Args:
        role_maker: Who this process is; read from the environment when omitted.
        is_collective: Whether the script has no use for parameter servers.
        strategy: Settings for the models distributed later.

    Raises:
        RoleError: If the environment is contradictory, or has servers where the script says collective.
        StrategyTypeError: If the strategy is not a `DistributedStrategy`.
        PeerLostError: If a rank did not come in time; names it.
    """
    if role_maker is not None and not isinstance(role_maker, Role):
        raise RoleError(
            f"role_maker must be a phalanx.cluster.Role, found {type(role_maker).__name__}. "
            "Leave it out: the role is read from the launcher's environment."
        )
    strategy = check_strategy(strategy) if strategy is not None else None
    role = role_maker or Role.detect()
    if is_collective and role.server_endpoints:
        raise RoleError(
            "fleet.init(is_collective=True), but the job was launched with parameter servers, "
            f"{len(role.server_endpoints)} of them. Launch without --server-num/--servers, or "
            "call fleet.init(is_collective=False)."
        )
    if strategy is not None:
        session.initial_strategy = engine.use_strategy(strategy)
    context = context_of.init(role)
    if role.is_worker and role.server_endpoints:
        from phalanx.ps.client import table_client as attach

        attach.current()  # tells the servers when this worker ends, though it may never come to a table
    return context


def distributed_optimizer(optimizer: OptimizerT, strategy: DistributedStrategy | None = None) -> OptimizerT:
    """Bind an optimizer to the job; returns the same torch Optimizer. Before or after `distributed_model`.

    With parameter servers it is enough: `distributed_model` may be left out. On a server it does nothing.
    """
    if _is_server_early():
        return optimizer
    engine.use_strategy(strategy)
    return engine.add_optimizer(optimizer)


def distributed_model(model: ModelT, *, plan: Plan | None = None) -> ModelT:
    """Distribute a model under the strategy; returns the same module, its `state_dict` keys unchanged. Collective.

    `scale_loss` and `apply_collective_grads` of older scripts are there and do nothing. On a server it does nothing.

    Args:
        model: A plain module.
        plan: A Plan in place of the one that the strategy makes, such as `px.auto_parallel(...).plan`. Loaders are not
            told of it: one whose size is per rank has smaller global batches where fewer ranks read rows of their own.
            Give such loaders `global_batch=`.
    """
    if _is_server_early():
        return model
    return with_old_words(engine.add_model(model, plan, expects_optimizer=True))


def worker_num() -> int:
    """Return the number of workers."""
    return _role().worker_num


def worker_index() -> int:
    """Return this worker's index.

    Raises:
        ConfigError: On a server.
    """
    role = _role()
    if role.kind == "server":
        raise ConfigError(f"worker_index() was called on server {role.rank}. Ask fleet.is_worker() first.")
    return role.rank


def is_first_worker() -> bool:
    """Return whether this process is worker 0."""
    return _role().kind == "worker" and _role().rank == 0


def is_worker() -> bool:
    """Return whether this process trains; False on a heter worker, which Phalanx gives no part in training."""
    return _role().is_worker


def is_server() -> bool:
    """Return whether this process is a parameter server."""
    return _role().kind == "server"


def server_num() -> int:
    """Return the number of parameter servers."""
    return len(_role().server_endpoints)


def local_rank() -> int:
    """Return this process's rank on its host."""
    return _role().local_rank


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """Return the workers' `host:port` list, or it joined with commas."""
    return _endpoint_list(_role().worker_endpoints, to_string)


def server_endpoints(to_string: bool = False) -> list[str] | str:
    """Return the servers' `host:port` list, or it joined with commas."""
    return _endpoint_list(_role().server_endpoints, to_string)


def barrier_worker() -> None:
    """Wait until every worker has called this, half an hour at most. Collective over the workers.

    Workers that are not here yet are named every 5 s.

    Raises:
        RoleError: On a server.
        PeerLostError: If a worker ended meanwhile, did not come, or was started again alone.
    """
    _need_worker("barrier_worker")
    if context_of.current().is_distributed:
        check_not_alone("barrier_worker")
        agreement.barrier("barrier_worker", timeout_s=_BARRIER_TIMEOUT_S)


def init_parallel_env() -> Context:
    """Meet the other ranks; the basic API's name for `init` without settings. Collective."""
    return init(is_collective=True)


prepare_context = init_parallel_env


def get_rank() -> int:
    """Return this worker's rank, as the launcher says, before `init` too; 0 without a launcher."""
    return _role_early().rank


def get_world_size() -> int:
    """Return the number of workers, as the launcher says, before `init` too; 1 without a launcher."""
    return _role_early().world_size


# --- parameter servers; what they need is imported by the verbs: no other job waits for it ----------------------------


def _names_old_arguments(verb: Callable[P, R]) -> Callable[P, R]:
    """Let a verb that is given the executor and programs of older scripts say what it takes."""
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def wrapper(*args: P.args, **named: P.kwargs) -> R:
        try:
            signature.bind(*args, **named)
        except TypeError as error:
            first = next(iter(signature.parameters))
            raise ConfigError(
                f"fleet.{verb.__name__} does not take these arguments: {error}. There are no executors, programs and "
                f"variables here. Write fleet.{verb.__name__}({first})."
            ) from None
        return verb(*args, **named)

    return wrapper


@_names_old_arguments
def init_server(model_dir: str | Path | None = None, var_names: Sequence[str] | None = None) -> None:
    """Say what this server starts from.

    Args:
        model_dir: Folder that `save_persistables` wrote; empty tables when None.
        var_names: Tables to load of it; all when None.

    Raises:
        RoleError: On a worker.
    """
    global _first
    _need_server("init_server")
    if model_dir is not None and not Path(model_dir).is_dir():
        raise ConfigError(f"init_server: there is no folder {str(model_dir)!r}. Name one that save_persistables wrote.")
    _first = (None if model_dir is None else Path(model_dir), var_names)


def run_server() -> None:
    """Hold tables until all workers have left.

    Raises:
        RoleError: On a worker.
        PeerLostError: If workers vanished.
    """
    _need_server("run_server")
    from phalanx.parallel import tables

    tables.serve(*_first)


def init_worker() -> None:
    """Do nothing on a worker: tables and dense parameters are set up when optimizer and model are, in any order.

    Raises:
        RoleError: On a server.
    """
    _need_worker("init_worker")


def stop_worker() -> None:
    """Send what is held back and leave the servers, which end when all workers have. Training ends with it.

    Raises:
        RoleError: On a server.
    """
    _need_worker("stop_worker")
    from phalanx.parallel import tables

    tables.finish()


@_names_old_arguments
def save_persistables(directory: str | Path, *, mode: str = "full") -> None:
    """Write all tables and dense parameters to a folder, at one moment.

    Not collective: one worker may call it, or all; a call that finds the folder up to date writes nothing. In sync mode
    it holds every step that this worker has made, of all workers. In a job without servers it writes the models that
    were distributed; `px.save` also writes optimizers, and models that are cut over ranks.

    Args:
        directory: Folder to write, seen by all servers.
        mode: `full`, `delta` (rows changed since the last full one), `serving` or `text`.

    Raises:
        RoleError: On a server.
        ConfigError: If a job without servers shards a model, or workers take local steps.
    """
    _need_worker("save_persistables")
    from phalanx.parallel import tables

    tables.save(Path(directory), mode)


@_names_old_arguments
def save_inference_model(directory: str | Path) -> None:
    """Write what prediction needs, rows without their optimizer state. See `save_persistables`."""
    _need_worker("save_inference_model")
    from phalanx.parallel import tables

    tables.save(Path(directory), "serving")


@_names_old_arguments
def load(directory: str | Path, var_names: Sequence[str] | None = None) -> None:
    """Replace tables and dense parameters by those of a folder that `save_persistables` wrote.

    Collective: every worker calls it, between two steps.

    Args:
        directory: The folder.
        var_names: Tables to load; all, and dense parameters, when None.

    Raises:
        RoleError: On a server.
        DataError: If the folder holds no complete snapshot.
    """
    _need_worker("load")
    from phalanx.parallel import tables

    tables.load(Path(directory), var_names)


def shrink() -> int:
    """End a day: decay the rows of every table and drop those its entry policy lets go.

    Acts on worker 0; may be called on all.

    Returns:
        Rows dropped; 0 on other workers.
    """
    _need_worker("shrink")
    from phalanx.parallel import tables

    return tables.shrink()


_BARRIER_TIMEOUT_S = 1800.0
"""Seconds to wait at a barrier: another worker may be writing or evaluating, and says so; as long as torch waits."""

_first: tuple[Path | None, Sequence[str] | None] = (None, None)
"""What `init_server` said: the folder to load, and the tables of it."""


def _need_server(verb: str) -> None:
    role = _role()
    if not role.is_server:
        raise RoleError(f"{verb}() was called on {role.kind} {role.rank}. Ask fleet.is_server() first.")


def _need_worker(verb: str) -> None:
    role = _role()
    if not role.is_worker:
        raise RoleError(f"{verb}() was called on {role.kind} {role.rank}. Ask fleet.is_worker() first.")


def _is_server_early() -> bool:
    return _role_early().is_server


def _role() -> Role:
    return context_of.current().role


def _role_early() -> Role:
    return _role() if context_of.is_initialized() else Role.detect()


def _endpoint_list(endpoints: tuple[str, ...], to_string: bool) -> list[str] | str:
    return ",".join(endpoints) if to_string else list(endpoints)


def __getattr__(name: str) -> Any:
    if name == "metrics":
        from phalanx.train.metrics import fleet as global_metrics

        return global_metrics
    raise missing("phalanx.fleet", name, __all__)
