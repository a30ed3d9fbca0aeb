"""`say_start`: what the launcher says as a job starts: mode, threads, warnings, environment of the first processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from phalanx.launch.job import attempt_resources
from phalanx.launch.process import environment
from phalanx.launch.reports import report
from phalanx.launch.reports.console import Console
from phalanx.launch.request import preflight
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.options import Options
from phalanx.launch.request.request import ROLES, LaunchRequest
from phalanx.launch.request.topology import Topology

logger = logging.getLogger("phalanx.launch")


def say_start(
    options: Options,
    request: LaunchRequest,
    host: Machine,
    console: Console,
    *,
    threads: Sequence[str],
    inherited: Mapping[str, str],
) -> None:
    """Say what is started, and what it may fail by.

    Args:
        options: Of the command.
        request: The job.
        host: This host.
        console: Where to.
        threads: What `describe_threads` returned.
        inherited: Environment of the launcher.
    """
    if options.is_verbose:
        console.write(report.banner(options.banner_items()))
        _say_mode(options, request, host, console)
        logger.info(". ".join(threads))
    else:
        console.write("\n".join([f"{describe_start(request)}; {threads[0]}", *threads[1:], *options.origin_lines, ""]))
    _say_place(options, request)
    if flag := options.misplaced_flag:
        logger.warning(
            "%s stands after the script, so the script gets it. To give it to the launcher: phalanx run %s ... %s",
            flag,
            flag,
            options.training_script,
        )
    for warning in preflight.look(inherited):
        logger.warning(warning)


def describe_threads(
    options: Options, request: LaunchRequest, host: Machine, threads: str, *, is_users: bool
) -> list[str]:
    """Return how many threads each process gets, and in a second line why only one process starts where nobody said."""
    source = "from your environment" if is_users else f"of {host.cores} cores"
    lines = [f"OMP_NUM_THREADS={threads} for each process ({source})"]
    if request.mode == "collective" and not request.gpus and options.nproc_per_node is None:
        lines.append("No -n given: 1 process, as one process uses every core. -n 2 starts two.")
    return lines


def describe_start(request: LaunchRequest) -> str:
    """Return in words how many processes start on this node, and on what."""
    if request.mode == "collective":
        counts = _count(request.counts["worker"], "rank")
    else:
        counts = ", ".join(
            _count(request.counts[role], role.replace("_", " ")) for role in ROLES if request.counts[role]
        )
    gpus = ",".join(gpu for of_worker in request.gpus for gpu in of_worker)
    return f"starting {counts} on this node, {f'GPU {gpus}' if gpus else 'CPU'}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _say_mode(options: Options, request: LaunchRequest, host: Machine, console: Console) -> None:
    gpus = len(host.usable_gpus)
    if request.mode == "ps":
        logger.info("Run parameter-sever mode. pserver arguments:%s, cuda count:%d", list(request.mode_flags), gpus)
        if gpus and not request.gpus:
            logger.info("Workers compute on the CPU. --gpus gives them GPUs; servers never need one.")
        return
    if request.mode_flags:
        logger.info("Run collective mode. gpu arguments:%s, cuda count:%d", list(request.mode_flags), gpus)
    else:
        compiled = "compiled with cuda" if host.has_cuda_build else "not compiled with cuda"
        logger.warning("Not found distinct arguments and %s. Default use collective mode", compiled)
    console.write(f"launch train in {'GPU' if request.gpus else 'CPU'} mode\n")


def _say_place(options: Options, request: LaunchRequest) -> None:
    origins = options.origins
    if request.nodes.is_multi_node and "node_rank" in origins:
        sources = ", ".join(origins[name] for name in ("node_rank", "nnodes") if name in origins)
        logger.info("this is node %d of %d (from %s)", request.nodes.rank, request.nodes.count, sources)


def say_topology(
    layout: Topology,
    facts: environment.JobFacts,
    console: Console,
    inherited: Mapping[str, str],
    *,
    is_verbose: bool,
) -> None:
    """Say where the logs are; where that is asked for, show the environment of the first process of each role too."""
    if not is_verbose:
        console.write(f"logs: {attempt_resources.log_files(layout, facts.mode, facts.log_dir)}\n")
        return
    for role in ROLES:
        processes = attempt_resources.local_processes(layout, role)
        if not processes:
            continue
        start = "Local start" if facts.mode == "collective" else f"Local {role} start"
        logger.info(
            "%s %d processes. First process distributed environment info (Only For Debug):",
            start,
            len(processes),
        )
        variables = environment.build(processes[0], layout, facts, inherited)
        console.write(report.environment_table(environment.table_rows(processes[0], facts.mode, variables)))
    logger.info(attempt_resources.log_hint(layout, facts.mode, facts.log_dir))
