"""`Nodes`: the hosts of a job and the index of this one, from `--ips`, `--nnodes` or endpoint lists."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cluster.env.environment import split_endpoint
from phalanx.errors import LaunchError
from phalanx.launch.request import machine as hosts
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.options import Options

_DOCUMENTATION_ADDRESS = "192.0.2.1"
"""An address for documentation: no host has it, so packets to it leave by the default route."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The hosts of a job as one of them sees it."""

    hosts: tuple[str, ...]
    """Address of every host by node rank; only the first is known when the job was given as a count of hosts."""

    count: int
    rank: int
    address: str
    """This host's own address."""

    names: tuple[str, ...] = ()
    """What a scheduler calls each host; empty where nobody named them."""

    @property
    def is_multi_node(self) -> bool:
        """Whether other launchers take part."""
        return self.count > 1

    def name(self, rank: int) -> str:
        """Return what to call host `rank` in a message."""
        names = self.names or self.hosts
        return names[rank] if rank < len(names) else f"node {rank}"


def collective_nodes(options: Options, machine: Machine) -> Nodes:
    """Return the hosts named by `--ips`, or counted by `--nnodes` and `--master-addr`.

    Raises:
        LaunchError: If an address is none, none or several of them are this host's, or the counts disagree.
    """
    if options.ips is not None:
        listed = tuple(part.strip() for part in options.ips.split(",") if part.strip())
        if not listed:
            raise LaunchError(f"--ips '{options.ips}' lists no host. Write e.g. --ips 10.0.0.1,10.0.0.2.")
        if options.nnodes is not None and options.nnodes != len(listed):
            raise LaunchError(
                f"--nnodes is {options.nnodes}, but --ips lists {len(listed)} hosts. Drop --nnodes or correct the list."
            )
        return match_host(options, machine, listed)
    if options.nnodes is None or options.nnodes == 1:
        _check_node_rank(options, 1)
        address = options.master_addr or "127.0.0.1"
        if not hosts.is_own_address(hosts.resolve(address)):
            raise LaunchError(
                f"--master-addr {address} is not this host, and --nnodes is 1. Add --nnodes N --node-rank K."
            )
        return Nodes((hosts.resolve(address),), 1, 0, hosts.resolve(address))
    return _counted_nodes(options, machine)


def _counted_nodes(options: Options, machine: Machine) -> Nodes:
    assert options.nnodes is not None
    if options.master_addr is None or options.node_rank is None:
        missing = "--master-addr" if options.master_addr is None else "--node-rank"
        raise LaunchError(
            f"{options.describe_option('nnodes')} needs the first host's address and this host's place, but {missing} "
            "is missing. Write e.g. --nnodes 2 --node-rank 0 --master-addr 10.0.0.1, or --ips 10.0.0.1,10.0.0.2."
        )
    _check_node_rank(options, options.nnodes)
    master = _first_host(options, machine)
    address = master if options.node_rank == 0 else hosts.address_towards(master)
    return Nodes((master,), options.nnodes, options.node_rank, address, options.host_names)


def _first_host(options: Options, machine: Machine) -> str:
    """The first host's address.

    A scheduler's name for it may be of use to the others only: Kubernetes publishes it once the pod runs, and on the
    first host itself it may mean loopback (DLC says localhost there, Debian 127.0.1.1).
    """
    name = options.master_addr
    assert name is not None
    if "master_addr" not in options.origins or hosts.is_ipv4(name):
        master = reachable(name)
    else:
        master = _scheduled(options, name)
        if options.node_rank == 0 and master.startswith("127."):
            return machine.pod_ip or hosts.address_towards(_DOCUMENTATION_ADDRESS)
    if options.node_rank == 0 and not hosts.is_own_address(master):
        raise LaunchError(
            f"{options.describe_option('node_rank')} is the host of "
            f"{options.describe_option('master_addr')}, which is not an address of this host. Correct one of them."
        )
    return master


def _scheduled(options: Options, name: str) -> str:
    """The address of a first host that a scheduler named; other hosts wait until its name means something."""
    try:
        return hosts.resolve_within(name, 0.0 if options.node_rank == 0 else options.timeout_s)
    except LaunchError:
        raise LaunchError(
            f"{options.describe_option('master_addr')} is the first host of this job, and no name this host can "
            "resolve. Set MASTER_ADDR, or give --master-addr, with that host's IPv4 address on every host."
        ) from None


def listed_nodes(options: Options, machine: Machine, endpoints: list[str]) -> Nodes:
    """Return the hosts in the order in which the endpoint lists first name them.

    Raises:
        LaunchError: As `collective_nodes`.
    """
    return match_host(
        options, machine, tuple(dict.fromkeys(split_endpoint(e, "an endpoint list")[0] for e in endpoints))
    )


def match_host(options: Options, machine: Machine, listed: tuple[str, ...]) -> Nodes:
    """Return the listed hosts, and which of them this is.

    Raises:
        LaunchError: If an address is none, none or several of them are this host's, or a host is listed twice.
    """
    _check_node_rank(options, len(listed))
    addresses = tuple(reachable(host) if len(listed) > 1 else hosts.resolve(host) for host in listed)
    for address, name in zip(addresses, listed, strict=True):
        if addresses.count(address) > 1:
            raise LaunchError(
                f"Host {name} ({address}) is listed twice. List each host once; -n says how many processes it runs."
            )
    ours = [rank for rank, address in enumerate(addresses) if hosts.is_own_address(address)]
    if options.node_rank is not None:
        rank = options.node_rank
        if rank not in ours:
            raise LaunchError(
                f"--node-rank {rank} is {listed[rank]}, which is not an address of this host. "
                "Run this command there, or correct the list."
            )
    elif machine.pod_ip in addresses:
        rank = addresses.index(machine.pod_ip)
    elif len(ours) == 1:
        rank = ours[0]
    elif not ours:
        raise LaunchError(
            f"None of the hosts {', '.join(listed)} is this host (its address towards {listed[0]} is "
            f"{hosts.address_towards(addresses[0])}). Correct the list, or run this command on a host of "
            "the list."
        )
    else:
        raise LaunchError(
            f"{' and '.join(listed[rank] for rank in ours)} are all addresses of this host, so its place is "
            "open. "
            f"Add --node-rank ({' or '.join(map(str, ours))})."
        )
    return Nodes(addresses, len(addresses), rank, addresses[rank])


def _check_node_rank(options: Options, count: int) -> None:
    if options.node_rank is not None and not 0 <= options.node_rank < count:
        raise LaunchError(
            f"{options.describe_option('node_rank')} is outside 0..{count - 1}: the job has {count} host(s)."
        )


def reachable(host: str) -> str:
    """Return the IPv4 address of a host that others must reach.

    Raises:
        LaunchError: If it is no address and no known name, or means 127.0.1.1: Debian's entry in /etc/hosts makes a
            host's own name useless here.
    """
    address = hosts.resolve(host)
    if address == "127.0.1.1" and host != address:
        raise LaunchError(
            f"Host name '{host}' resolves to 127.0.1.1 on this machine (a line in /etc/hosts), which no "
            "other host can "
            "reach. Write its network address instead, or remove that line."
        )
    return address
