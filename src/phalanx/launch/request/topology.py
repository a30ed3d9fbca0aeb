"""`Topology`: rank, endpoint and devices of every process of a job, from the offers of all nodes (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypedDict

from phalanx.errors import LaunchError
from phalanx.launch.request.request import ROLES, RoleName

LOG_STEMS: dict[RoleName, str] = {"server": "serverlog", "worker": "workerlog", "heter_worker": "heterlog"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOffer:
    """What one node brings into the job; exchanged between launchers, so plain values only."""

    node_rank: int
    address: str
    hostname: str
    endpoints: dict[RoleName, list[str]]
    """Bound `ip:port` of each local process, by role."""

    job_id: str
    store_port: int = 0
    """Port of the job's store; only node 0 has one."""

    terms: dict[str, str] = field(default_factory=dict)
    """Settings every node must have the same, by flag."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> NodeOffer:
        """Undo `to_json`.

        Raises:
            LaunchError: If it is no offer; another program may write to the hosts' store, which asks for no password.
        """
        try:
            offer = cls(**value)
            is_offer = (
                all(type(number) is int for number in (offer.node_rank, offer.store_port))
                and _are_texts(offer.address, offer.hostname, offer.job_id, *offer.terms, *offer.terms.values())
                and set(offer.endpoints) <= set(ROLES)
                and all(isinstance(listed, list) and _are_texts(*listed) for listed in offer.endpoints.values())
            )
        except (TypeError, AttributeError):
            is_offer = False
        if not is_offer:
            raise LaunchError(
                f"A host brought {str(value)[:60]!r} into the job, which no launcher of this version says. Run the "
                "same version on every host, and let nothing else connect to --master-port."
            )
        return offer


def _are_texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process of the job."""

    role: RoleName
    rank: int
    """Place among all processes of this role."""

    local_rank: int
    node_rank: int
    endpoint: str
    log_file: str
    env_file: str = ""
    """Where the process writes the environment it starts with; empty for nowhere."""

    member: str = ""
    """Member id in an elastic job, whose ranks change; empty in others."""

    is_joiner: bool = False
    """Whether it starts alone, as rank 0, to become a rank of a job that runs."""

    layout: int = 0
    """Of a server: how often the number of servers had changed when it was first started, in this start of the job."""

    @property
    def id(self) -> str:
        """Name of the process between launcher and fork server."""
        name = f"{self.role}.{self.member if self.is_joiner else self.rank}"
        return f"{name}.{self.layout}" if self.layout else name

    @property
    def title(self) -> str:
        """How messages call it: `rank 1` for workers, `member n0.1` in elastic jobs, `server 0`, `heter worker 0`."""
        if self.member:
            return f"member {self.member}"
        return f"rank {self.rank}" if self.role == "worker" else f"{self.role.replace('_', ' ')} {self.rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The whole job."""

    job_id: str
    master: tuple[str, int]
    """Address and port of the job's store."""

    hostnames: tuple[str, ...]
    local_counts: tuple[dict[RoleName, int], ...]
    endpoints: dict[RoleName, tuple[str, ...]]
    """Every endpoint of a role, by rank."""

    local: tuple[Process, ...]
    """The processes of this node, in start order."""

    node_rank: int

    def count(self, role: RoleName) -> int:
        """Return the number of processes of a role in the whole job."""
        return len(self.endpoints[role])


def check_terms(offers: Sequence[NodeOffer]) -> None:
    """Raise LaunchError if the nodes were started with settings that differ where they must not."""
    first = offers[0]
    for offer in offers[1:]:
        # The last differing term says most: a list of hosts rather than their number.
        for name in reversed([n for n in first.terms if n in offer.terms]):
            if offer.terms[name] != first.terms[name]:
                raise LaunchError(
                    f"{name} is {first.terms[name]} on {first.hostname} (node {first.node_rank}) and "
                    f"{offer.terms[name]} on {offer.hostname} (node {offer.node_rank}). "
                    "Start every node with the same value."
                )


class OutputFiles(TypedDict):
    """Where a process writes."""

    log_file: str
    env_file: str


def output_files(role: RoleName, name: str, log_dir: str, *, per_rank_dir: bool) -> OutputFiles:
    """Return where a process writes: files in one folder, or a folder for each process."""
    if not per_rank_dir:
        return {"log_file": f"{log_dir}/{LOG_STEMS[role]}.{name}", "env_file": ""}
    own = f"{log_dir}/{'rank' if role == 'worker' else role}_{name}"
    return {"log_file": f"{own}/train.log", "env_file": f"{own}/env.log"}


def build_topology(
    offers: Sequence[NodeOffer],
    node_rank: int,
    listed: dict[RoleName, tuple[str, ...]],
    log_dir: str,
    *,
    ranks: Sequence[Sequence[int]] = (),
    per_rank_dir: bool = False,
    is_elastic: bool = False,
) -> Topology:
    """Give every process its rank.

    Ranks follow the user's endpoint list where there is one, or a rank table, else the nodes in order.

    Args:
        offers: One per node, by node rank.
        node_rank: The node whose processes are wanted.
        listed: Endpoints the user listed, by role.
        log_dir: Folder of the log files on this node.
        ranks: Ranks of each node's workers, where a rank table says them.
        per_rank_dir: Whether each process has a folder of its own there.
        is_elastic: Whether ranks may change, so that processes are known by member ids.
    """
    endpoints: dict[RoleName, tuple[str, ...]] = {}
    local: list[Process] = []
    for role in ROLES:
        offered = [endpoint for offer in offers for endpoint in offer.endpoints.get(role, [])]
        if role == "worker" and ranks:
            in_order = [rank for own in ranks for rank in own]
            offered = [endpoint for _, endpoint in sorted(zip(in_order, offered, strict=True))]
        endpoints[role] = listed.get(role) or tuple(offered)
        for local_rank, endpoint in enumerate(offers[node_rank].endpoints.get(role, [])):
            rank = endpoints[role].index(endpoint)
            local.append(
                Process(
                    role=role,
                    rank=rank,
                    local_rank=local_rank,
                    node_rank=node_rank,
                    endpoint=endpoint,
                    **output_files(role, str(rank), log_dir, per_rank_dir=per_rank_dir),
                    member=f"n{offers[node_rank].node_rank}.{local_rank}" if is_elastic else "",
                )
            )
    return Topology(
        job_id=offers[0].job_id,
        master=(offers[0].address, offers[0].store_port),
        hostnames=tuple(offer.hostname for offer in offers),
        local_counts=tuple({role: len(offer.endpoints.get(role, [])) for role in ROLES} for offer in offers),
        endpoints=endpoints,
        local=tuple(local),
        node_rank=node_rank,
    )


def with_servers(topology: Topology, endpoints: Sequence[str], layout: int, log_dir: str) -> Topology:
    """Return a job of one host with other servers.

    Args:
        topology: The job, which has servers.
        endpoints: `ip:port` of the new servers, by rank.
        layout: How often the number of servers has changed then.
        log_dir: Folder of the log files.
    """
    first, *_ = [process for process in topology.local if process.role == "server"]
    servers = [
        replace(
            first,
            rank=rank,
            local_rank=rank,
            endpoint=endpoint,
            layout=layout,
            **output_files("server", str(rank), log_dir, per_rank_dir=bool(first.env_file)),
        )
        for rank, endpoint in enumerate(endpoints)
    ]
    others = [process for process in topology.local if process.role != "server"]
    return replace(
        topology,
        local_counts=({**topology.local_counts[0], "server": len(servers)},),
        endpoints={**topology.endpoints, "server": tuple(endpoints)},
        local=(*servers, *others),
    )
