"""`build`: environment variables of each process, in Phalanx's, torchrun's and Fleet's names (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.launch.request.topology import Process, Topology

RETRY_S = "60"
"""How long workers keep asking a server that is being restarted."""

_FLEET_ROLES = {"worker": "TRAINER", "server": "PSERVER", "heter_worker": "HETER_TRAINER"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """What the environment says besides the layout."""

    mode: str
    log_dir: str
    attempt: int
    max_restarts: int
    timeout_s: float
    gloo_path: str
    """Folder for a rendezvous by files, not made unless used."""

    interface: str | None
    """Network interface on the way to the master; None leaves the choice to the libraries."""

    is_multi_host: bool
    gpus: tuple[tuple[str, ...], ...] = ()
    secret: str = field(default="", repr=False)
    """The job's secret, in hexadecimal digits; empty where nothing of ours needs one."""

    rank_table: str = ""
    """The rank table the job was started from, else empty."""

    device_ids: tuple[int, ...] = ()
    """Devices of the local ranks in that table."""

    server_dir: str = ""
    """Folder of the servers' state; empty when they keep none."""

    server_layout: int = 0
    """How often the number of servers has changed."""

    server_layout_file: str = ""
    """File that says which servers there are once that has changed; empty where it cannot."""

    check_nan_inf: bool = False
    """Whether steps are tested for NaN and infinity."""

    flight_log: bool = False
    """Whether each update is logged."""

    hang_after_s: float = 0.0
    """Seconds after which a wait is looked at; 0 for never."""

    slow_share: float = 0.0
    """Part of the time that ranks may wait for one; 0 where nobody asks."""

    replicas: int | None = None
    """Logical replicas that the job asks for; None leaves it to the script."""

    least_workers: int = 0
    """Fewest workers that a job with servers continues with; 0 where their number is fixed."""


def build(process: Process, layout: Topology, facts: JobFacts, inherited: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables to set for one process; None removes one.

    Args:
        process: The process.
        layout: The job.
        facts: Further facts of the job.
        inherited: The launcher's own environment, whose values win where a user may choose.
    """
    variables = _ours(process, layout, facts)
    variables |= _torchrun(process, layout, facts)
    variables |= _fleet(process, layout, facts, inherited)
    if facts.rank_table:
        variables |= {
            "RANK_TABLE_FILE": facts.rank_table,
            "RANK_SIZE": str(layout.count("worker")),
            "DEVICE_ID": str(facts.device_ids[process.local_rank]),
        }
    if facts.mode == "ps":
        variables |= _servers(process, facts, inherited)
    if facts.interface is not None and "GLOO_SOCKET_IFNAME" not in inherited:
        variables["GLOO_SOCKET_IFNAME"] = facts.interface
    if facts.is_multi_host and facts.interface not in (None, "lo") and "NCCL_SOCKET_IFNAME" not in inherited:
        variables["NCCL_SOCKET_IFNAME"] = facts.interface
    return variables


def _local_world(process: Process, layout: Topology) -> int:
    return layout.local_counts[process.node_rank][process.role]


def _ours(process: Process, layout: Topology, facts: JobFacts) -> dict[str, str | None]:
    return {
        "PHALANX_RANK": str(process.rank),
        "PHALANX_WORLD_SIZE": str(layout.count(process.role)),
        "PHALANX_LOCAL_RANK": str(process.local_rank),
        "PHALANX_LOCAL_WORLD_SIZE": str(_local_world(process, layout)),
        "PHALANX_NODE_RANK": str(process.node_rank),
        "PHALANX_NODE_COUNT": str(len(layout.hostnames)),
        "PHALANX_MASTER_ADDR": layout.master[0],
        "PHALANX_MASTER_PORT": str(layout.master[1]),
        "PHALANX_ROLE": process.role.upper(),
        "PHALANX_WORKER_ENDPOINTS": ",".join(layout.endpoints["worker"]),
        "PHALANX_SERVER_ENDPOINTS": ",".join(layout.endpoints["server"]),
        "PHALANX_HETER_ENDPOINTS": ",".join(layout.endpoints["heter_worker"]),
        "PHALANX_ENDPOINT": process.endpoint,
        "PHALANX_ATTEMPT": str(facts.attempt),
        "PHALANX_JOB_ID": layout.job_id,
        "PHALANX_LOG_DIR": facts.log_dir,
        "PHALANX_LOG_FILE": process.log_file,
        "PHALANX_ERROR_FILE": error_file(process, facts.log_dir),
        "PHALANX_EVENTS_FILE": events_file(process, facts.log_dir),
        "PHALANX_RENDEZVOUS_TIMEOUT_S": f"{facts.timeout_s:g}",
        "PHALANX_HANG_AFTER_S": f"{facts.hang_after_s:g}",
        "PHALANX_SLOW_SHARE": f"{facts.slow_share:g}",
        **({} if facts.replicas is None else {"PHALANX_REPLICAS": str(facts.replicas)}),
        **({"PHALANX_CHECK_NAN_INF": "1"} if facts.check_nan_inf else {}),
        **({"PHALANX_FLIGHT_LOG": "1"} if facts.flight_log else {}),
        "PHALANX_ENDPOINT_FD": None,
        "PHALANX_MEMBERSHIP_FD": None,
        "PHALANX_MEMBER_ID": process.member or None,
        "PHALANX_JOINING": "1" if process.is_joiner else None,
        "PHALANX_JOB_SECRET": facts.secret or None,
    }


def _servers(process: Process, facts: JobFacts, inherited: Mapping[str, str]) -> dict[str, str | None]:
    """What outlives the end of a server."""
    variables: dict[str, str | None] = {
        "PHALANX_SERVER_RETRY_S": inherited.get("PHALANX_SERVER_RETRY_S", RETRY_S if facts.max_restarts else "0"),
        "PHALANX_LEAST_WORKERS": str(facts.least_workers) if facts.least_workers else None,
        "PHALANX_SERVER_LAYOUT": facts.server_layout_file or None,
    }
    if process.role == "server":
        variables |= {
            "PHALANX_SERVER_DIR": f"{facts.server_dir}/{process.rank}" if facts.server_dir else None,
            "PHALANX_STATUS_FILE": status_file(process, facts.log_dir),
            "PHALANX_SERVER_DURABILITY": inherited.get("PHALANX_SERVER_DURABILITY", "process"),
        }
    return variables


def error_file(process: Process, log_dir: str) -> str:
    """Return where a process records the exception that ended it."""
    return f"{log_dir}/error.{process.id}.json"


def events_file(process: Process, log_dir: str) -> str:
    """Return where a process writes its run events."""
    return f"{log_dir}/events.{process.id}.jsonl"


def status_file(process: Process, log_dir: str) -> str:
    """Return where a server writes what it holds and does."""
    return f"{log_dir}/status.{process.id}.json"


def layout_folder(root: str, layout: int) -> str:
    """Return the folder of the servers' state, a folder for each, when their number has changed so often."""
    return f"{root}/layout-{layout}" if layout else root


def server_status_files(layout: Topology, log_dir: str) -> dict[str, str]:
    """Return where the servers of this host write what they hold and do, by process id."""
    return {process.id: status_file(process, log_dir) for process in layout.local if process.role == "server"}


def _torchrun(process: Process, layout: Topology, facts: JobFacts) -> dict[str, str | None]:
    before = sum(counts[process.role] for counts in layout.local_counts[: process.node_rank])
    return {
        "RANK": str(process.rank),
        "WORLD_SIZE": str(layout.count(process.role)),
        "LOCAL_RANK": str(process.local_rank),
        "LOCAL_WORLD_SIZE": str(_local_world(process, layout)),
        "GROUP_RANK": str(process.node_rank),
        "GROUP_WORLD_SIZE": str(len(layout.hostnames)),
        "ROLE_RANK": str(before + process.local_rank),
        "ROLE_WORLD_SIZE": str(layout.count(process.role)),
        "ROLE_NAME": "default",
        "MASTER_ADDR": layout.master[0],
        "MASTER_PORT": str(layout.master[1]),
        "TORCHELASTIC_RESTART_COUNT": str(facts.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(facts.max_restarts),
        "TORCHELASTIC_RUN_ID": layout.job_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _fleet(process: Process, layout: Topology, facts: JobFacts, inherited: Mapping[str, str]) -> dict[str, str | None]:
    variables: dict[str, str | None] = {
        "PADDLE_TRAINER_ENDPOINTS": ",".join(layout.endpoints["worker"]),
        "PADDLE_TRAINERS_NUM": str(layout.count("worker")),
        "PADDLE_CURRENT_ENDPOINT": process.endpoint,
        "TRAINING_ROLE": _FLEET_ROLES[process.role],
        "PADDLE_TRAINER_ID": None if process.role == "server" else str(process.rank),
    }
    if facts.mode == "ps":
        host, _, port = process.endpoint.rpartition(":")
        variables |= {
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(layout.endpoints["server"]),
            "PADDLE_HETER_TRAINER_IP_PORT_LIST": ",".join(layout.endpoints["heter_worker"]),
            "PADDLE_WITH_GLOO": inherited.get("PADDLE_WITH_GLOO", "0"),
            "PADDLE_GLOO_RENDEZVOUS": inherited.get("PADDLE_GLOO_RENDEZVOUS", "3"),
            "PADDLE_GLOO_HTTP_ENDPOINT": f"{layout.master[0]}:{layout.master[1]}",
            "PADDLE_GLOO_FS_PATH": inherited.get("PADDLE_GLOO_FS_PATH", facts.gloo_path),
        }
        if process.role != "worker":
            variables |= {"POD_IP": host, "PADDLE_PORT": port}
    return variables | _gpu_variables(process, facts)


def _gpu_variables(process: Process, facts: JobFacts) -> dict[str, str | None]:
    """Say which GPUs are this worker's.

    In collective mode every rank sees all GPUs of the job, its own at the index of its local rank: that is where
    scripts written for torchrun look. Parameter-server workers see only their own; servers and heter workers none.
    """
    if facts.mode == "ps" and (process.role != "worker" or not facts.gpus):
        return {"CUDA_VISIBLE_DEVICES": ""}
    if not facts.gpus:
        return {}
    own = facts.gpus[process.local_rank]
    seen = own
    if facts.mode == "collective":
        seen = tuple(gpus[0] for gpus in facts.gpus) + tuple(gpu for gpus in facts.gpus for gpu in gpus[1:])
    visible, selected = ",".join(seen), ",".join(own)
    return {
        "CUDA_VISIBLE_DEVICES": visible,
        "XPU_VISIBLE_DEVICES": visible,
        "FLAGS_selected_gpus": selected,
        "FLAGS_selected_xpus": selected,
    }


_SHARED_BY_ROLES = (
    "PADDLE_PSERVERS_IP_PORT_LIST",
    "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_HETER_TRAINER_IP_PORT_LIST",
    "PADDLE_WITH_GLOO",
    "PADDLE_GLOO_RENDEZVOUS",
    "PADDLE_GLOO_HTTP_ENDPOINT",
    "PADDLE_GLOO_FS_PATH",
)
"""Rows of both parameter-server tables."""

_SHOWN = {
    "worker": (
        "PADDLE_TRAINER_ENDPOINTS",
        "PADDLE_TRAINER_ID",
        "PADDLE_TRAINERS_NUM",
        "PADDLE_CURRENT_ENDPOINT",
        "FLAGS_selected_gpus",
    ),
    "ps server": (
        "TRAINING_ROLE",
        "POD_IP",
        "PADDLE_PORT",
        "PADDLE_TRAINERS_NUM",
        *_SHARED_BY_ROLES,
    ),
    "ps worker": (
        "TRAINING_ROLE",
        "PADDLE_TRAINER_ID",
        "PADDLE_TRAINERS_NUM",
        *_SHARED_BY_ROLES,
        "CUDA_VISIBLE_DEVICES",
        "FLAGS_selected_gpus",
        "XPU_VISIBLE_DEVICES",
        "FLAGS_selected_xpus",
    ),
}
_SHOWN["ps heter_worker"] = ("POD_IP", "PADDLE_PORT", *_SHOWN["ps worker"])


def table_rows(process: Process, mode: str, variables: Mapping[str, str | None]) -> list[tuple[str, str]]:
    """Return the rows of the environment table, from a fixed list: no secret can be among them."""
    names = _SHOWN[process.role if mode == "collective" else f"ps {process.role}"]
    return [(name, value) for name in names if (value := variables.get(name)) is not None]
