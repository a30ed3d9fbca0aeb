"""`phalanx scale`: change how many ranks a running elastic job has, or workers beside parameter servers."""

from __future__ import annotations

import json
import sys

import click

from phalanx.errors import LaunchError
from phalanx.launch.cli.running_job import find_job
from phalanx.launch.elastic.control import ask


@click.command(name="scale", epilog="\b\nExample:\n  phalanx scale 4f2a 3")
@click.argument("job", metavar="JOB")
@click.argument("ranks", metavar="N", type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(job: str, ranks: int, as_json: bool) -> None:
    """Change the elastic job JOB, as `phalanx ps` lists it, to N ranks.

    JOB is the beginning of its name or the pid of its launcher. Ranks that are added take the state from others; ranks
    that are taken away end after the step they compute. N lies in the range that the job was started with. With
    parameter servers N is the number of workers, which take the state from the servers.
    """
    running = find_job(job)
    if running["control"] is None:
        raise LaunchError(
            f"Job {running['job_id']} was started with a fixed number of ranks. Start it with a range: phalanx run "
            "-n 1:4 ..., or with parameter servers --worker-num 1:4."
        )
    done = ask(running["control"], {"scale": ranks})
    sys.stdout.write(json.dumps({"done": done}) + "\n" if as_json else f"{done}\n")
