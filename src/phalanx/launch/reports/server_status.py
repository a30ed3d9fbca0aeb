"""`ServerStatus`: what the servers of a job report of themselves: as lines for a person, and as Prometheus text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, ValidationError

from phalanx.units import format_bytes

_MOST_BYTES = 4 << 20
"""Most of a file that is read: scripts may write there too."""


class ServerStatus(BaseModel, frozen=True):
    """What a server reports of itself; see `phalanx.ps.server.status.server_status`."""

    time: float
    server: NonNegativeInt
    lag: NonNegativeInt
    tables: dict[str, dict[str, NonNegativeInt]]
    bytes: NonNegativeInt
    budget: NonNegativeInt
    log_bytes: NonNegativeInt
    requests: dict[str, NonNegativeFloat]
    rates: dict[str, NonNegativeFloat]


_TABLE_COUNTS = (
    ("rows", "gauge", "Rows of a table that a server holds."),
    ("bytes", "gauge", "Memory of a table's rows and index, in bytes."),
    ("stored", "gauge", "Rows of a table that are in files, not in memory."),
    ("file_bytes", "gauge", "Size of these files, in bytes."),
    ("file_reads", "counter", "Rows that pulls and pushes took from these files."),
    ("pulled", "counter", "Ids that pulls asked for."),
    ("missed", "counter", "Those of them that had no row."),
    ("pushed", "counter", "Rows of accepted pushes."),
    ("dropped", "counter", "Gradients of ids that were not admitted."),
    ("evicted", "counter", "Rows that a table's max_bytes dropped."),
)
_REQUEST_COUNTS = (
    ("pull_requests", "counter", "Pulls that a server answered."),
    ("push_requests", "counter", "Pushes that a server answered."),
    ("pull_keys", "counter", "Ids of these pulls."),
    ("push_keys", "counter", "Ids of these pushes."),
    ("pull_seconds", "counter", "Seconds from a pull to its answer, waits included."),
    ("push_seconds", "counter", "Seconds from a push to its answer, waits included."),
    ("wait_seconds", "counter", "Seconds that requests waited for other workers or for a save."),
    ("active", "gauge", "Requests under way."),
    ("waiting", "gauge", "Requests that wait for other workers or for a save."),
)
_SIZES = (
    ("bytes", "gauge", "Memory of all tables of a server, in bytes."),
    ("budget", "gauge", "Memory that its tables may take, in bytes."),
    ("log_bytes", "gauge", "Size of its log, in bytes."),
    ("lag", "gauge", "Steps between the fastest and the slowest worker."),
)


def read_statuses(paths: Iterable[str | Path]) -> list[ServerStatus]:
    """Return what the servers of these files last reported, by number; those without a whole report are left out."""
    statuses = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                statuses.append(ServerStatus.model_validate_json(file.read(_MOST_BYTES)))
        except (OSError, ValidationError):
            continue  # It has not reported yet, or a script wrote there.
    return sorted(statuses, key=lambda status: status.server)


def server_lines(statuses: Sequence[ServerStatus]) -> list[str]:
    """Return one line for each server and one for each table of all of them; no lines without a server."""
    if not statuses:
        return []
    head = f"{'server':<9}{'rows':>13}{'memory':>10}{'budget':>10}{'pulls/s':>9}{'pushes/s':>10}"
    head += f"{'ms':>7}{'waiting':>9}{'lag':>6}"
    return [head, *map(_server_line, statuses), *_table_lines(statuses)]


def _server_line(status: ServerStatus) -> str:
    rates, rows = status.rates, sum(table.get("rows", 0) for table in status.tables.values())
    return (
        f"{status.server:<9}{rows:>13,}{format_bytes(status.bytes):>10}{format_bytes(status.budget):>10}"
        f"{rates.get('pulls_per_s', 0):>9.0f}{rates.get('pushes_per_s', 0):>10.0f}"
        f"{rates.get('ms_per_request', 0):>7.2f}{status.requests.get('waiting', 0):>9.0f}{status.lag:>6}"
    )


def _table_lines(statuses: Sequence[ServerStatus]) -> list[str]:
    """Return one line for each table, summed over its servers."""
    totals = _table_totals(statuses)
    if not totals:
        return []
    width = max(5, *map(len, totals))
    head = f"{'table':<{width}}{'rows':>13}{'memory':>10}{'in files':>13}{'hit rate':>10}"
    lines = [f"{head}{'pushed':>14}{'dropped':>12}{'evicted':>12}"]
    for name, total in totals.items():
        hits = "-" if not total["pulled"] else f"{100 * (1 - total['missed'] / total['pulled']):.1f} %"
        lines.append(
            f"{name:<{width}}{total['rows']:>13,}{format_bytes(total['bytes']):>10}{total['stored']:>13,}{hits:>10}"
            f"{total['pushed']:>14,}{total['dropped']:>12,}{total['evicted']:>12,}"
        )
    return lines


def _table_totals(statuses: Sequence[ServerStatus]) -> dict[str, Counter[str]]:
    """Return the counts of each table, summed over the servers."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for status in statuses:
        for name, counts in status.tables.items():
            totals[name].update(counts)
    return totals


@dataclass(frozen=True, slots=True)
class JobStatuses:
    """The servers of one job, by the name it is known by."""

    job: str
    servers: Sequence[ServerStatus]


def prometheus_lines(jobs: Sequence[JobStatuses]) -> Iterator[str]:
    """Yield the metrics of all servers of some jobs in the Prometheus text format."""
    if not any(job.servers for job in jobs):
        return
    for name, kind, meaning in _TABLE_COUNTS:
        yield from _family(f"phalanx_table_{name}", kind, meaning, _table_samples(jobs, name))
    for name, kind, meaning in (*_REQUEST_COUNTS, *_SIZES):
        yield from _family(f"phalanx_server_{name}", kind, meaning, _server_samples(jobs, name))


Sample = tuple[dict[str, str], float]


def _table_samples(jobs: Sequence[JobStatuses], name: str) -> Iterator[Sample]:
    for job in jobs:
        for status in job.servers:
            for table, counts in status.tables.items():
                yield {"job": job.job, "server": str(status.server), "table": table}, counts.get(name, 0)


def _server_samples(jobs: Sequence[JobStatuses], name: str) -> Iterator[Sample]:
    for job in jobs:
        for status in job.servers:
            value = status.requests[name] if name in status.requests else getattr(status, name, 0)
            yield {"job": job.job, "server": str(status.server)}, value


def _family(name: str, kind: str, meaning: str, samples: Iterable[Sample]) -> Iterator[str]:
    name += "_total" if kind == "counter" else ""
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        text = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels.items())
        yield f"{name}{{{text}}} {value:.12g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
