"""The command `phalanx doctor`: this machine, or every node of a job in one table."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.markup import escape
from rich.table import Table

from phalanx import __version__
from phalanx.diagnose.commands import console
from phalanx.diagnose.doctor.checks import Check
from phalanx.launch.request.options import DEFAULT_PORT
from phalanx.units import format_seconds

if TYPE_CHECKING:
    from phalanx.diagnose.doctor.nodes import JobReport, MeetingOptions

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


@click.command(
    epilog="\b\nExample:\n  phalanx doctor\n  phalanx doctor --nnodes 2 --node-rank 0 --master-addr 10.0.0.1"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@click.option("--nnodes", type=click.IntRange(1), default=1, help="Nodes of the job; run this on each of them.")
@click.option("--node-rank", type=click.IntRange(0), default=0, help="This node's place, from 0.")
@click.option("--master-addr", metavar="HOST", help="Address of the first node.")
@click.option(
    "--master-port",
    type=click.IntRange(1, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port where they meet.",
)
@click.option("--network", is_flag=True, help="Measure bandwidth between nodes, too: some seconds for each pair.")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds to wait for the other nodes.")
def doctor(
    as_json: bool, nnodes: int, node_rank: int, master_addr: str | None, master_port: int, network: bool, timeout: float
) -> None:
    """Check this machine for what training needs; exit with 1 if something fails.

    With --nnodes, every node of a job: run it on each with its own --node-rank and the same --master-addr; each prints
    one table of all.
    """
    from phalanx.diagnose.doctor import facts

    if nnodes == 1:
        if network:
            raise click.UsageError("--network measures between nodes: add --nnodes, --node-rank and --master-addr.")
        results = list(facts.examine())
        if as_json:
            click.echo(json.dumps({"ok": not _failures(results), "checks": [r.to_json() for r in results]}, indent=1))
        else:
            _show(_table(results), results)
        sys.exit(1 if _failures(results) else 0)
    if master_addr is None or node_rank >= nnodes:
        raise click.UsageError(
            f"--nnodes {nnodes} needs --master-addr, the first node's address, and --node-rank from 0 to {nnodes - 1}."
        )
    from phalanx.diagnose.doctor.nodes import MeetingOptions

    options = MeetingOptions(
        node_rank=node_rank, nnodes=nnodes, master_addr=master_addr, master_port=master_port, timeout_s=timeout
    )
    _examine_nodes(options, with_bandwidth=network, as_json=as_json)


def _failures(results: Sequence[Check]) -> int:
    return sum(check.state == "failed" for check in results)


def _examine_nodes(options: MeetingOptions, *, with_bandwidth: bool, as_json: bool) -> None:
    from phalanx.diagnose.doctor import facts, job_checks
    from phalanx.diagnose.doctor.nodes import NodeMeeting

    meeting = NodeMeeting(options)
    try:
        own = list(facts.examine(options.master_addr if options.node_rank else meeting.address))
        report = meeting.exchange(_versions(), own, with_bandwidth=with_bandwidth)
    finally:
        meeting.close()
    across = job_checks.examine(report)
    results = [*across, *(check for node in report.nodes for check in node.checks)]
    if as_json:
        click.echo(json.dumps(_to_json(report, across, ok=not _failures(results)), indent=1))
    else:
        _show(_nodes_table(report, across), results)
        if with_bandwidth:
            console().print(_network_table(report))
    sys.exit(1 if _failures(results) else 0)


def _versions() -> dict[str, str]:
    return {
        "phalanx": __version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }


def _to_json(report: JobReport, across: Sequence[Check], *, ok: bool) -> dict[str, Any]:
    nodes = [
        {
            "node_rank": node.node_rank,
            "host": node.host,
            "address": node.address,
            "versions": node.versions,
            "checks": [check.to_json() for check in node.checks],
        }
        for node in report.nodes
    ]
    links = [
        {"from": source, "to": target, **asdict(link)}
        for source, row in enumerate(report.links)
        for target, link in enumerate(row)
        if link is not None
    ]
    return {"ok": ok, "checks": [check.to_json() for check in across], "nodes": nodes, "network": links}


# -- tables ----------------------------------------------------------------------------------------------------------


def _show(table: Table, results: Sequence[Check]) -> None:
    console().print(table)
    counts = Counter(check.state for check in results)
    click.echo(f"{counts['ok']} ok, warnings: {counts['warning']}, failed: {counts['failed']}")


def _coloured(check: Check, text: str) -> str:
    return f"[{_COLOURS[check.state]}]{escape(text)}[/]"


def _table(results: Sequence[Check]) -> Table:
    table = Table("check", "state", "found", "what to do", title="phalanx doctor", expand=False)
    for check in results:
        table.add_row(check.name, _coloured(check, check.state), escape(check.observed), escape(check.advice))
    return table


def _nodes_table(report: JobReport, across: Sequence[Check]) -> Table:
    """Return a row for each check, a column for each node, and below what to do; checks of all nodes come first."""
    headings = [f"{node.node_rank}: {node.host}\n{node.address}" for node in report.nodes]
    table = Table("check", *headings, title="phalanx doctor", box=box.ROUNDED, expand=False)
    for check in across:
        cell = _coloured(check, f"{check.state}: {check.observed}")
        table.add_row(check.name, cell, *[""] * (len(report.nodes) - 1))
    table.add_section()
    for name in dict.fromkeys(check.name for node in report.nodes for check in node.checks):
        of_nodes = [next((c for c in node.checks if c.name == name), None) for node in report.nodes]
        table.add_row(name, *(_cell(check) for check in of_nodes))
    advice = list(_advice(report, across))
    table.caption, table.caption_justify = escape("\n".join(advice)), "left"
    return table


def _cell(check: Check | None) -> str:
    if check is None:
        return ""
    return escape(check.observed) if check.state == "ok" else _coloured(check, f"{check.state}: {check.observed}")


def _advice(report: JobReport, across: Sequence[Check]) -> Iterator[str]:
    """Yield each advice once, with the nodes that it is for."""
    for check in across:
        if check.advice:
            yield f"{check.name}: {check.advice}"
    nodes_of: dict[tuple[str, str], list[int]] = {}
    for node in report.nodes:
        for check in node.checks:
            if check.advice:
                nodes_of.setdefault((check.name, check.advice), []).append(node.node_rank)
    for (name, advice), nodes in nodes_of.items():
        yield f"{name} (node {', '.join(map(str, nodes))}): {advice}"


def _network_table(report: JobReport) -> Table:
    """Return latency and bandwidth from each node, by row, to each other one."""
    table = Table("from, to", *(f"{node.node_rank}: {node.host}" for node in report.nodes), title="network")
    for node, row in zip(report.nodes, report.links, strict=True):
        cells = [
            ""
            if link is None
            else link.error or f"{format_seconds(link.latency_s)}, {link.bytes_per_s * 8 / 1e9:.3g} Gbit/s"
            for link in row
        ]
        table.add_row(f"{node.node_rank}: {node.host}", *map(escape, cells))
    return table
