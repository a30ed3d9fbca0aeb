"""`phalanx restart-servers`: start the parameter servers of a running job again, one after the other."""

from __future__ import annotations

import json
import sys
import time

import click

from phalanx.errors import LaunchError
from phalanx.launch.cli.running_job import find_job
from phalanx.launch.elastic.control import ask

_ASK_S = 0.5
"""Between two questions how far the restart is."""


@click.command(name="restart-servers", epilog="\b\nExample:\n  phalanx restart-servers 4f2a")
@click.argument("job", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(job: str, as_json: bool) -> None:
    """Restart the parameter servers of JOB one after the other, while it trains.

    JOB is the beginning of the name that `phalanx ps` lists, or the pid of its launcher. Only servers on this host are
    restarted, and the job must have been started with --max-restarts. Each server writes its state, ends, runs its
    script again and loads its state. No update is lost, and workers wait for the server that is away. Returns when all
    are back.
    """
    running = find_job(job)
    if running["control"] is None or running["mode"] != "ps":
        raise LaunchError(
            f"Job {running['job_id']} has no servers that can be started again: phalanx run --max-restarts 1 "
            "--server-num 2 ... starts such a job."
        )
    started = time.monotonic()
    servers = ask(running["control"], {"servers": "restart"})
    before = ""
    while progress := ask(running["control"], {"servers": "progress"}):
        if progress != before:
            click.echo(progress, err=True)
        before = progress
        time.sleep(_ASK_S)
    seconds, back = time.monotonic() - started, ask(running["control"], {"servers": "restarted"})
    if back != servers:
        raise LaunchError(
            f"The workers of job {running['job_id']} left before all of its servers were back. Of {servers} these are: "
            f"{back or 'none'}."
        )
    report = {"restarted": servers.split(", "), "seconds": round(seconds, 1)}
    sys.stdout.write(json.dumps(report) + "\n" if as_json else f"{servers}: started again in {seconds:.1f} s\n")
