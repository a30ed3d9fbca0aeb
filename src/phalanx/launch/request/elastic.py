"""`ElasticRange`: how many ranks and nodes an elastic job may have; `WorkerRange` with parameter servers (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import LaunchError
from phalanx.launch.request.options import Options


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticRange:
    """The size of an elastic job, from `-n a:b` and `--nnodes a:b`."""

    least_ranks: int
    most_ranks: int
    least_nodes: int = 1
    most_nodes: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRange:
    """How many workers a job with parameter servers may have, from `--worker-num a:b`."""

    least: int
    most: int


def worker_range(options: Options) -> WorkerRange | None:
    """Return how many workers a job may have, or None where `--worker-num` is one number.

    Args:
        options: What the user typed.

    Raises:
        LaunchError: If the options do not go together.
    """
    if options.least_workers is None:
        return None
    assert options.worker_num is not None
    flag = f"--worker-num {options.least_workers}:{options.worker_num}"
    if options.servers or options.workers:
        raise LaunchError(
            f"{flag} lets the number of workers change, and --servers and --workers list every process. Start them on "
            f"this host with --server-num 1 {flag}, or give --worker-num one number."
        )
    if options.heter_worker_num or options.heter_workers:
        raise LaunchError(
            f"{flag} lets workers come and go, which heter workers cannot follow. Drop --heter-worker-num, or give "
            "--worker-num one number."
        )
    return WorkerRange(least=options.least_workers, most=options.worker_num)


def elastic_range(options: Options, ranks_here: int) -> ElasticRange | None:
    """Return the size that an elastic job may have, or None where neither -n nor --nnodes is a range.

    Args:
        options: What the user typed.
        ranks_here: Ranks that this host starts with.

    Raises:
        LaunchError: If the options do not go together.
    """
    if options.least_nproc is None and options.least_nnodes is None:
        return None
    if options.rank_table is not None:
        raise LaunchError(
            f"--rank-table fixes every rank, and {_range_flag(options)} lets their number change. Drop one of the two."
        )
    nodes = options.nnodes or 1
    most = nodes * ranks_here
    if options.replicas is not None and options.replicas < most:
        raise LaunchError(
            f"{_range_flag(options)} allows {most} ranks, but --replicas {options.replicas} gives only "
            f"{options.replicas} something to do. Give --replicas {most}, or more, or a smaller range."
        )
    least_nodes = options.least_nnodes or nodes
    return ElasticRange(
        # A rank of -n 2 that is lost is replaced; the other one of the last node continues meanwhile.
        least_ranks=least_nodes * (options.least_nproc or 1),
        most_ranks=most,
        least_nodes=least_nodes,
        most_nodes=nodes,
    )


def _range_flag(options: Options) -> str:
    if options.least_nproc is not None:
        return f"-n {options.least_nproc}:{options.nproc_per_node}"
    return f"--nnodes {options.least_nnodes}:{options.nnodes}"
