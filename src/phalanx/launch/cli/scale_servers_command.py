"""`phalanx scale-servers`: change how many parameter servers a running job has, while it trains."""

from __future__ import annotations

import json
import sys
import time

import click

from phalanx.errors import LaunchError
from phalanx.i18n import tr
from phalanx.launch.cli.running_job import find_job
from phalanx.launch.elastic.control import ask

_ASK_S = 0.5
"""Between two questions how far the change is."""


@click.command(name="scale-servers", epilog="\b\nExample:\n  phalanx scale-servers 4f2a 3")
@click.argument("job", metavar="JOB")
@click.argument("count", metavar="N", type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(job: str, count: int, as_json: bool) -> None:
    """Change JOB to N parameter servers while it trains.

    JOB is the beginning of the name that `phalanx ps` lists, or the pid of its launcher. All of its processes must run
    on this host, and it must have been started with --max-restarts. The servers stop at one moment and write their
    tables, and N new servers read them. Workers wait meanwhile, and train on in the same processes. No update is lost
    or counted twice. Returns when the job has N servers; where a process ends in the middle of the change, the job
    keeps those it has, and this command fails.
    """
    running = find_job(job)
    if running["control"] is None or running["mode"] != "ps":
        raise LaunchError(
            tr(
                "Job {job} has no servers whose number can change: phalanx run --max-restarts 1 --server-num 2 ... "
                "starts such a job.",
                job=running["job_id"],
            )
        )
    started = time.monotonic()
    ask(running["control"], {"servers": "scale", "count": count})
    before = ""
    while progress := ask(running["control"], {"servers": "scaling"}):
        if progress != before:
            click.echo(progress, err=True)
        before = progress
        time.sleep(_ASK_S)
    outcome = json.loads(ask(running["control"], {"servers": "scaled"}))
    if "servers" not in outcome:
        raise LaunchError(
            tr("The job was started again in the middle of the change. `phalanx ps` shows how many servers it has.")
        )
    if outcome.get("error"):
        raise LaunchError(
            tr("The job keeps its {count} servers: {why}", count=outcome["servers"], why=outcome["error"])
        )
    outcome["seconds"] = round(time.monotonic() - started, 1)
    text = tr(
        "{before} servers -> {servers} servers in {seconds:.1f} s",
        before=outcome["before"],
        servers=outcome["servers"],
        seconds=outcome["seconds"],
    )
    sys.stdout.write((json.dumps(outcome) if as_json else text) + "\n")
