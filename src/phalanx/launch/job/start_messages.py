"""What the launcher says as a job starts: mode, threads, warnings, and the environment of the first processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from phalanx.launch.job import attempt_resources
from phalanx.launch.job.console import Console
from phalanx.launch.process import environment
from phalanx.launch.reports import report
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
    threads: str,
    inherited: Mapping[str, str],
) -> None:
    """Say what is started, and what it may fail by.

    Args:
        options: Of the command.
        request: The job.
        host: This host.
        console: Where to.
        threads: What was set for threads, in words.
        inherited: Environment of the launcher.
    """
    console.write(report.banner(options.banner_items()))
    _say_mode(options, request, host, console)
    if flag := options.misplaced_flag:
        logger.warning(
            "%s stands after the script, so the script gets it. To give it to the launcher: phalanx run %s ... %s",
            flag,
            flag,
            options.training_script,
        )
    logger.info(threads)
    for warning in preflight.look(inherited):
        logger.warning(warning)


def describe_threads(options: Options, request: LaunchRequest, host: Machine, threads: str, *, is_users: bool) -> str:
    """Return how many threads each process gets, and why."""
    source = "from your environment" if is_users else f"of {host.cores} cores"
    setting = f"OMP_NUM_THREADS={threads} for each process ({source})"
    if request.mode == "ps" or request.gpus or options.nproc_per_node is not None:
        return setting
    return f"{setting}. No -n given: 1 process, as one process uses every core. -n 2 starts two."


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
    origins = options.origins
    if request.nodes.is_multi_node and "node_rank" in origins:
        sources = ", ".join(origins[name] for name in ("node_rank", "nnodes") if name in origins)
        logger.info("this is node %d of %d (from %s)", request.nodes.rank, request.nodes.count, sources)


def say_topology(layout: Topology, facts: environment.JobFacts, console: Console, inherited: Mapping[str, str]) -> None:
    """Show how many processes start here, and the environment of the first of each role."""
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
