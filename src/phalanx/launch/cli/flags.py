"""`command`, `run`: the command line of `phalanx run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from phalanx.cluster.allocation import COUNTS
from phalanx.errors import ConfigError, PhalanxError
from phalanx.i18n import LANGUAGES
from phalanx.launch.cli.flag_types import Count, CountOrRange, Port, Seconds, complete_path
from phalanx.launch.cli.mistakes import describe_mistake, refuse_old_flags
from phalanx.launch.job.fork_server_handle import ForkServerHandle
from phalanx.launch.process import log_format
from phalanx.launch.request.options import DEFAULT_PORT, Options


def _split_ranges(values: dict[str, Any]) -> None:
    """Give the ends of -n a:b, --nnodes a:b and --worker-num a:b fields of their own."""
    ranges = (("nproc_per_node", "least_nproc"), ("nnodes", "least_nnodes"), ("worker_num", "least_workers"))
    for name, least in ranges:
        if isinstance(values[name], range):
            values[least], values[name] = values[name].start, values[name].stop - 1


def _choose_language(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Make the choice known here and to the ranks; eager, so that errors of other flags obey it."""
    if value is not None:
        os.environ["PHALANX_LANG"] = value


def _normalize(token: str) -> str:
    """Return a flag as it is declared: with - for _; what `phalanx job` calls -n is known too."""
    name = token.replace("_", "-")
    return "nproc-per-node" if name == "procs-per-node" else name


_CONTEXT: dict[str, Any] = {
    "allow_interspersed_args": False,
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": _normalize,
    "max_content_width": 110,
}


@click.command(name="run", context_settings=_CONTEXT)
@click.option(
    "-n",
    "--nproc-per-node",
    "--nprocs",
    "nproc_per_node",
    type=CountOrRange("number of processes"),
    help="Processes on this host; 1:4 for an elastic job. Default: one per GPU; on CPU 1, as it uses every core.",
)
@click.option(
    "--gpus",
    "--devices",
    "gpus",
    metavar="LIST",
    help="GPUs to use, e.g. 0,1, or all. Default: every visible GPU; with servers, none.",
)
@click.option("--ips", metavar="LIST", help="Hosts of the job, the same list on each, e.g. 10.0.0.1,10.0.0.2.")
@click.option(
    "--nnodes",
    type=CountOrRange("number of hosts"),
    help="Number of hosts, instead of --ips; 1:4 for an elastic job.",
)
@click.option("--node-rank", type=Count("host number", 0), help="This host's place; found by address unless ambiguous.")
@click.option("--master-addr", metavar="HOST", help="First host, with --nnodes.")
@click.option(
    "--rank-table",
    metavar="FILE",
    help="Which rank runs on which device of which host, instead of --ips and -n; or set RANK_TABLE_FILE.",
)
@click.option(
    "--world-size-counts",
    type=click.Choice(COUNTS),
    help="What RANK and WORLD_SIZE set for this launcher count: 'nodes' in a DLC or PyTorchJob pod.",
)
@click.option(
    "--http-port",
    "--master-port",
    "http_port",
    type=Port(),
    help=f"Port on the first host. One host: chosen by the system; several: {DEFAULT_PORT}.",
)
@click.option(
    "--server-num",
    type=Count("number of servers", instead="; without servers start with -n 2"),
    help="Parameter servers on this host.",
)
@click.option(
    "--worker-num",
    type=CountOrRange("number of workers"),
    help="Parameter-server workers on this host; 1:4 where they may come and go.",
)
@click.option(
    "--heter-worker-num",
    type=Count("number of heter workers"),
    help="Heter workers here: a role for your script to fill.",
)
@click.option("--servers", default="", metavar="LIST", help="Servers of the whole job, ip:port,ip:port.")
@click.option("--workers", default="", metavar="LIST", help="Workers of the whole job, ip:port,ip:port.")
@click.option("--heter-workers", default="", metavar="LIST", help="Heter workers of the whole job.")
@click.option("--log-dir", default="log", show_default=True, metavar="DIR", help="Folder of the log files.")
@click.option(
    "--per-rank-dir",
    is_flag=True,
    help="Give each rank a folder, LOG_DIR/rank_N, with train.log and env.log, its environment.",
)
@click.option(
    "--log-format",
    type=click.Choice(log_format.FORMATS),
    help="Form of log lines, the script's own too when given.",
)
@click.option(
    "--max-restarts",
    type=Count("number of restarts", 0),
    help="How often a failed job is started again (default 0); with servers: a failed process, alone; "
    "elastic: a lost rank is replaced (default 3 in 10 minutes).",
)
@click.option(
    "--replicas",
    type=Count("number of logical replicas", 0),
    envvar="PHALANX_REPLICAS",
    help="Logical replicas that split global batches: results have the same bits on any number of ranks up to it.",
)
@click.option(
    "--check-nan-inf",
    is_flag=True,
    help="Test gradients and loss of every step; name module, operator, rank and sample of the first NaN or infinity.",
)
@click.option(
    "--flight-log",
    is_flag=True,
    help="Log a few hundred bytes of each update in LOG_DIR/flight.N.jsonl, for phalanx replay.",
)
@click.option(
    "--server-dir",
    metavar="DIR",
    help="Where servers keep their state. Default: LOG_DIR/servers with --max-restarts, else nowhere.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(),
    envvar="PHALANX_RENDEZVOUS_TIMEOUT_S",
    default=60,
    show_default=True,
    show_envvar=True,
    help="Seconds to wait for other hosts and ranks.",
)
@click.option(
    "--hang-after",
    "hang_after_s",
    type=Seconds("for never"),
    envvar="PHALANX_HANG_AFTER_S",
    default=10,
    show_default=True,
    show_envvar=True,
    help="Seconds beyond the usual that ranks may wait for one until a report says where it is; 0 for no report.",
)
@click.option(
    "--hang-timeout",
    "hang_timeout_s",
    type=Seconds("to wait for ever"),
    envvar="PHALANX_HANG_TIMEOUT_S",
    default=300,
    show_default=True,
    show_envvar=True,
    help="Seconds from that report to the end of the job, while the rank does not work; 0 waits for ever.",
)
@click.option(
    "--slow-share",
    type=click.FloatRange(0.0, 1.0),
    envvar="PHALANX_SLOW_SHARE",
    default=0.05,
    show_default=True,
    show_envvar=True,
    help="Part of the time that ranks may wait for one until a report says why it is slow; 0 for no report.",
)
@click.option(
    "-v",
    "--verbose",
    "is_verbose",
    is_flag=True,
    help="Show every setting and the environment of the first process at the start, as fleetrun does.",
)
@click.option(
    "--lang",
    type=click.Choice(LANGUAGES),
    callback=_choose_language,
    expose_value=False,
    is_eager=True,
    help="Language of what you must act on. Default: from LANG.",
)
@click.option("-m", "is_module", is_flag=True, help="TRAINING_SCRIPT is a module, as in python -m.")
@refuse_old_flags
@click.argument("training_script", shell_complete=complete_path)
@click.argument("training_script_args", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_path)
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> int:
    """Start TRAINING_SCRIPT on every GPU or process of this host and watch over it.

    \b
    Example:
      phalanx run -n 2 train.py --lr 0.1                   two processes here
      phalanx run --gpus 0,1 train.py                      one process per GPU
      phalanx run --ips 10.0.0.1,10.0.0.2 -n 4 train.py    the same on both hosts
      phalanx run --server-num 1 --worker-num 2 train.py   parameter servers

    Flags may be written with _ or -. What follows the script belongs to the script. Rank 0 is shown here,
    every rank writes LOG_DIR/workerlog.N. When a rank fails all end, and the last lines say which failed
    first and why.
    """  # noqa: D301
    from phalanx.launch.job.launcher import Launcher
    from phalanx.launch.job.meeting import InterruptedJobError
    from phalanx.launch.reports.console import Console

    run_as = ctx.obj
    if values.pop("is_module"):
        values["training_script"] = f"-m {values['training_script']}"
    _split_ranges(values)
    values["replacements"] = values["max_restarts"]
    values["max_restarts"] = values["max_restarts"] or 0
    values["is_verbose"] = values["is_verbose"] or run_as["is_verbose"]
    options = Options(**values, wants_servers=run_as["wants_servers"])
    console = Console()
    log_format.configure_launcher(options.log_format or "default", console)
    try:
        return Launcher(options, run_as["server"], console).run()
    except InterruptedJobError as stop:
        console.write(f"stopped by {stop}\n")
        return 128 + stop.number


def _obey_language(arguments: Sequence[str]) -> None:
    """Obey a --lang that click has not read, because it stopped at a mistake."""
    for before, word in zip(("", *arguments), arguments, strict=False):
        flag, _, value = word.rpartition("=") if "=" in word else (before, "", word)
        if flag == "--lang" and value in LANGUAGES:
            os.environ["PHALANX_LANG"] = value


def run(arguments: Sequence[str], server: ForkServerHandle | None, *, name: str, wants_servers: bool) -> int:
    """Parse the command line and run the job.

    Returns:
        The exit code: 2 for a mistake in the command, 1 when another host or the launcher itself failed,
        else the job's.
    """
    # Who starts a job by one of Fleet's names may read what Fleet's launcher printed.
    is_fleet = name == "fleetrun" or "phalanx.distributed." in name
    program = {"server": server, "wants_servers": wants_servers, "is_verbose": is_fleet}
    try:
        return int(command.main(list(arguments), prog_name=name, standalone_mode=False, obj=program) or 0)
    except click.UsageError as error:
        _obey_language(arguments)
        sys.stderr.write(f"{name}: {describe_mistake(error)}\n")
        return error.exit_code
    except PhalanxError as error:
        sys.stdout.flush()
        sys.stderr.write(f"{name}: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        if server is not None:
            server.close()
