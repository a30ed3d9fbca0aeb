"""Read the `Role` of a process from the environment of Phalanx, torchrun, Fleet, srun or mpirun.

Three families live on the process level and must agree where more than one is set. `srun` and `mpirun` come after them,
and only when the process was started by them directly; last a rank that a loop started from a rank table. Levels and
precedence: docs/design/roles.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.cluster.env.environment import Environment, split_endpoint
from phalanx.cluster.role import mpi_srun_role, rank_table_role
from phalanx.cluster.role.role import Kind, Launcher, Role
from phalanx.errors import RoleError, did_you_mean

KINDS: dict[str, Kind] = {
    "WORKER": "worker",
    "TRAINER": "worker",
    "SERVER": "server",
    "PSERVER": "server",
    "HETER_WORKER": "heter_worker",
    "HETER_TRAINER": "heter_worker",
}
"""Spellings of `PHALANX_ROLE` and `TRAINING_ROLE`."""

_OURS = ("PHALANX_RANK", "PHALANX_WORLD_SIZE")
_TORCHRUN = ("RANK", "WORLD_SIZE")
_FLEET = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_PSERVERS_IP_PORT_LIST", "TRAINING_ROLE")

_SAME_FACT = (
    ("PHALANX_RANK", "RANK", "PADDLE_TRAINER_ID"),
    ("PHALANX_WORLD_SIZE", "WORLD_SIZE", "PADDLE_TRAINERS_NUM"),
    ("PHALANX_LOCAL_RANK", "LOCAL_RANK"),
    ("PHALANX_LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("PHALANX_MASTER_ADDR", "MASTER_ADDR"),
    ("PHALANX_MASTER_PORT", "MASTER_PORT"),
    ("PHALANX_WORKER_ENDPOINTS", "PADDLE_TRAINER_ENDPOINTS"),
    ("PHALANX_SERVER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST"),
    ("PHALANX_HETER_ENDPOINTS", "PADDLE_HETER_TRAINER_IP_PORT_LIST"),
    ("PHALANX_ENDPOINT", "PADDLE_CURRENT_ENDPOINT"),
    ("PHALANX_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"),
)


def read_role(variables: Mapping[str, str]) -> Role:
    """Return the Role that `variables` describe.

    Raises:
        RoleError: If they are missing, malformed or disagree.
        ConfigError: If the rank table of a rank started by hand is wrong.
    """
    env = Environment(variables)
    kind = _kind(env)
    _check_agreement(env, kind)
    if any(env.text(name) for name in _OURS):
        return _by_rank(env, kind, "PHALANX_", ("PHALANX_NODE_RANK", "PHALANX_NODE_COUNT"), "phalanx")
    if any(env.text(name) for name in _TORCHRUN) and kind == "worker":
        return _by_rank(env, kind, "", ("GROUP_RANK", "GROUP_WORLD_SIZE"), "torchrun")
    if any(env.text(name) for name in _FLEET):
        return _fleet(env, kind)
    return mpi_srun_role.step_role(env) or rank_table_role.table_role(env) or Role()


def _kind(env: Environment) -> Kind:
    kinds: dict[str, Kind] = {}
    for name in ("PHALANX_ROLE", "TRAINING_ROLE"):
        value = env.text(name)
        if value is None:
            continue
        if value.upper() not in KINDS:
            choices = ["WORKER", "SERVER", "HETER_WORKER"] if name == "PHALANX_ROLE" else list(KINDS)[1::2]
            raise RoleError(
                f"{name} must be one of {', '.join(choices)}, found {value!r}."
                f"{did_you_mean(value, choices)} Correct it."
            )
        kinds[name] = KINDS[value.upper()]
    if len(set(kinds.values())) > 1:
        raise _disagreement(env, *kinds)
    return next(iter(kinds.values()), "worker")


def _check_agreement(env: Environment, kind: Kind) -> None:
    for names in _SAME_FACT:
        values = {name: env.text(name) for name in names if env.text(name) is not None}
        if kind != "worker":
            # Fleet counts trainers for every kind of process; the others count processes of the own kind.
            values.pop("PADDLE_TRAINERS_NUM", None)
        first = next(iter(values), "")
        for name in values:
            if _comparable(values[name]) != _comparable(values[first]):
                raise _disagreement(env, first, name)


def _comparable(value: str | None) -> tuple[str, ...]:
    return tuple(part.strip().lstrip("0") for part in (value or "").split(","))


def _disagreement(env: Environment, first: str, second: str) -> RoleError:
    return RoleError(
        f"{first}={env.text(first)} and {second}={env.text(second)} disagree about this process. "
        "One launcher writes both alike: unset the one that does not belong to this job."
    )


def _job(env: Environment) -> dict[str, Any]:
    return {
        "least_workers": env.integer("PHALANX_LEAST_WORKERS") or 0,
        "attempt": env.integer("PHALANX_ATTEMPT") or env.integer("TORCHELASTIC_RESTART_COUNT") or 0,
        "job_id": env.text("PHALANX_JOB_ID") or env.text("TORCHELASTIC_RUN_ID") or "",
        "log_dir": env.text("PHALANX_LOG_DIR") or "",
        "secret": env.secret("PHALANX_JOB_SECRET"),
    }


def _master(env: Environment, prefix: str, world_size: int) -> dict[str, Any]:
    if world_size == 1 and not (env.text(f"{prefix}MASTER_ADDR") and env.text(f"{prefix}MASTER_PORT")):
        return {}
    because = f"{prefix}WORLD_SIZE={world_size}"
    return {
        "master_addr": env.need_text(f"{prefix}MASTER_ADDR", because),
        "master_port": env.port(f"{prefix}MASTER_PORT", because),
    }


def _rank_and_size(env: Environment, rank_name: str, size_name: str) -> tuple[int, int]:
    size = env.integer(size_name, minimum=1)
    if size is None:
        size = env.need_integer(size_name, f"{rank_name}={env.text(rank_name)}", minimum=1)
    rank = env.integer(rank_name)
    if rank is None:
        rank = 0 if size == 1 else env.need_integer(rank_name, f"{size_name}={size}")
    if rank >= size:
        raise RoleError(f"{rank_name}={rank} does not fit {size_name}={size}: ranks run from 0 to {size - 1}.")
    return rank, size


def _by_rank(env: Environment, kind: Kind, prefix: str, node_names: tuple[str, str], launcher: Launcher) -> Role:
    """The Role of a family that says rank and size: ours with its prefix, or torchrun's with none."""
    rank, size = _rank_and_size(env, f"{prefix}RANK", f"{prefix}WORLD_SIZE")
    endpoints = env.all_endpoints()
    own = env.text("PHALANX_ENDPOINT") or env.text("PADDLE_CURRENT_ENDPOINT") or _own_endpoint(endpoints, kind, rank)
    return Role(
        kind=kind, rank=rank, world_size=size, endpoint=own, launcher=launcher,
        **_place(env, prefix, node_names, rank, size), **endpoints, **_master(env, prefix, size), **_job(env),
    )  # fmt: skip


def _own_endpoint(endpoints: Mapping[str, tuple[str, ...]], kind: Kind, rank: int) -> str:
    field = {"worker": "worker_endpoints", "server": "server_endpoints", "heter_worker": "heter_endpoints"}[kind]
    return endpoints[field][rank] if rank < len(endpoints[field]) else ""


def _place(env: Environment, prefix: str, node_names: tuple[str, str], rank: int, size: int) -> dict[str, Any]:
    """Where on which host. A script that only has rank and size runs one process a host, or all on loopback."""
    address = env.text(f"{prefix}MASTER_ADDR") or ""
    is_one_host = address.startswith("127.") or address in ("localhost", "::1")
    local_rank = env.integer(f"{prefix}LOCAL_RANK")
    local_size = env.integer(f"{prefix}LOCAL_WORLD_SIZE", minimum=1)
    if local_rank is None and local_size is None and is_one_host:
        local_rank, local_size = rank, size
    local_rank = local_rank or 0
    if local_size is None:
        local_size = size if is_one_host else local_rank + 1
    if local_rank >= local_size:
        raise RoleError(
            f"{prefix}LOCAL_RANK={local_rank} does not fit {prefix}LOCAL_WORLD_SIZE={local_size}: "
            f"local ranks run from 0 to {local_size - 1}."
        )
    node_rank, node_count = env.integer(node_names[0]), env.integer(node_names[1], minimum=1)
    if node_count is None:
        node_count = max(1, -(-size // local_size), (node_rank or 0) + 1)
    if node_rank is None:
        node_rank = min(rank // local_size, node_count - 1)
    return {
        "local_rank": local_rank, "local_world_size": local_size, "node_rank": node_rank, "node_count": node_count,
    }  # fmt: skip


def _fleet(env: Environment, kind: Kind) -> Role:
    endpoints = env.all_endpoints()
    if endpoints["server_endpoints"]:
        env.need_text("TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST (a job with parameter servers)")
    if kind == "server":
        return _fleet_server(env, endpoints)
    rank, size = _fleet_rank(env, kind, endpoints)
    listed = endpoints["worker_endpoints" if kind == "worker" else "heter_endpoints"]
    own = env.text("PADDLE_CURRENT_ENDPOINT") or (listed[rank] if rank < len(listed) else "")
    if listed and own != listed[rank]:
        raise RoleError(
            f"PADDLE_CURRENT_ENDPOINT={own} is not entry PADDLE_TRAINER_ID={rank} of the endpoint list "
            f"{','.join(listed)}. Correct one of them."
        )
    return Role(
        kind=kind, rank=rank, world_size=size, endpoint=own, launcher="fleet",
        **_fleet_place(listed, rank), **endpoints, **_fleet_master(env, endpoints, size), **_job(env),
    )  # fmt: skip


def _fleet_rank(env: Environment, kind: Kind, endpoints: Mapping[str, tuple[str, ...]]) -> tuple[int, int]:
    because = f"TRAINING_ROLE={env.text('TRAINING_ROLE')}" if env.text("TRAINING_ROLE") else "A Fleet environment"
    trainers = env.need_integer("PADDLE_TRAINERS_NUM", because, minimum=1)
    listed = endpoints["worker_endpoints"]
    if listed and len(listed) != trainers:
        raise RoleError(
            f"PADDLE_TRAINERS_NUM={trainers}, but PADDLE_TRAINER_ENDPOINTS lists {len(listed)}: {','.join(listed)}. "
            "Correct one of them."
        )
    size = trainers if kind == "worker" else max(1, len(endpoints["heter_endpoints"]))
    rank = env.need_integer("PADDLE_TRAINER_ID", because)
    if rank >= size:
        total = f"PADDLE_TRAINERS_NUM={size}" if kind == "worker" else f"{size} heterogeneous workers"
        raise RoleError(f"PADDLE_TRAINER_ID={rank} does not fit {total}: ranks run from 0 to {size - 1}.")
    return rank, size


def _fleet_server(env: Environment, endpoints: dict[str, Any]) -> Role:
    because = "TRAINING_ROLE=PSERVER"
    env.need_text("PADDLE_PSERVERS_IP_PORT_LIST", because)
    env.need_integer("PADDLE_TRAINERS_NUM", because, minimum=1)
    own = f"{env.need_text('POD_IP', because)}:{env.port('PADDLE_PORT', because)}"
    listed = endpoints["server_endpoints"]
    if own not in listed:
        raise RoleError(
            f"POD_IP:PADDLE_PORT={own} is not in PADDLE_PSERVERS_IP_PORT_LIST={','.join(listed)}. Correct one of them."
        )
    rank = listed.index(own)
    return Role(
        kind="server", rank=rank, world_size=len(listed), endpoint=own, launcher="fleet",
        **_fleet_place(listed, rank), **endpoints, **_job(env),
    )  # fmt: skip


def _fleet_place(listed: tuple[str, ...], rank: int) -> dict[str, Any]:
    hosts = [split_endpoint(entry, "endpoint list")[0] for entry in listed]
    if not hosts:
        return {}
    order = list(dict.fromkeys(hosts))
    return {
        "local_rank": hosts[:rank].count(hosts[rank]),
        "local_world_size": hosts.count(hosts[rank]),
        "node_rank": order.index(hosts[rank]),
        "node_count": len(order),
    }


def _fleet_master(env: Environment, endpoints: Mapping[str, tuple[str, ...]], size: int) -> dict[str, Any]:
    """The store's address: the http rendezvous if one is named, else the first trainer, as Fleet has it."""
    if env.text("MASTER_ADDR") and env.text("MASTER_PORT"):
        return _master(env, "", size)
    http = env.text("PADDLE_GLOO_HTTP_ENDPOINT")
    first = http or next(iter(endpoints["worker_endpoints"]), None)
    if first is None:
        return {}
    source = "PADDLE_GLOO_HTTP_ENDPOINT" if http else "PADDLE_TRAINER_ENDPOINTS"
    host, port = split_endpoint(first, source)
    return {"master_addr": host, "master_port": port}
