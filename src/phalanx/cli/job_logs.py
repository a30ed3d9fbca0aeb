"""`phalanx job logs`: print a log, or follow it while it grows."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

import click

from phalanx.cli.output import talk
from phalanx.i18n import tr
from phalanx.jobs.protocol import Jobs

_LOOK_S = 0.5
_PART = 1 << 18


@dataclass(frozen=True)
class _Log:
    """The log of a rank, and how to print it: its text, or an object of JSON for each part."""

    jobs: Jobs
    job: str
    rank: str
    as_json: bool


def whole(jobs: Jobs, job: str, *, rank: str | None = None, attempt: int | None = None, as_json: bool = False) -> None:
    """Print what there is of a log: by default of the rank that failed, or of rank 0."""
    if rank is None:
        rank = _failed_log(jobs, job, attempt) or "0"
        if rank != "0":
            talk(tr("The log of rank {rank}, which failed; --rank chooses another.", rank=rank))
    end, _ = _print_from(_Log(jobs, job, rank, as_json), attempt, 0)
    if not end:
        others = jobs.logs_of(job, attempt=attempt)
        if not jobs.job(job).state.is_terminal:
            talk(tr("{job} has written nothing there yet.", job=job))
        elif rank in others:
            talk(tr("{job} wrote nothing to the log of {rank}.", job=job, rank=rank))
        else:
            talk(tr("{job} has no log of {rank}.", job=job, rank=rank))
        if others:
            talk(tr("Its logs: {names}. Choose with --rank.", names=", ".join(others)))


def _failed_log(jobs: Jobs, job: str, attempt: int | None) -> str:
    """Return the log of the rank to blame for the end of an attempt, by default the last; empty if there is none."""
    number = attempt or jobs.job(job).attempt
    names = (record.failed_log for record in jobs.attempts(job) if record.number == number)
    return next((name for name in names if name in jobs.logs_of(job, attempt=attempt)), "")


def follow(jobs: Jobs, job: str, *, rank: str = "0", attempt: int | None = None, as_json: bool = False) -> None:
    """Print a log until the job has ended, across attempts; or the log of one attempt until its end."""
    log = _Log(jobs, job, rank, as_json)
    number, offset = attempt or jobs.job(job).attempt, 0
    while True:
        record = jobs.job(job)  # asked before the log, which is then at its end if the job is
        ended = False
        if number:
            offset, ended = _print_from(log, number, offset)
        if attempt is None and record.attempt != number:
            number, offset = record.attempt, 0
            if number > 1:
                talk(tr("attempt {number}", number=number))
        elif record.state.is_terminal or (attempt is not None and ended):
            return
        else:
            time.sleep(_LOOK_S)


def _print_from(log: _Log, attempt: int | None, offset: int) -> tuple[int, bool]:
    """Print a log from `offset` to its present end; return where that is, and whether no more can come."""
    while True:
        part = log.jobs.log(log.job, rank=log.rank, attempt=attempt, offset=offset, limit=_PART)
        if not log.as_json:
            click.echo(part.text, nl=False)
        elif part.text:
            source = {"job": log.job, "rank": log.rank, "attempt": attempt, "offset": offset}
            click.echo(json.dumps(source | asdict(part), ensure_ascii=False))
        offset = part.next
        if part.ended or not part.text:
            return offset, part.ended
