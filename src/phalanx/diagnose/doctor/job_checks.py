"""Checks of `phalanx doctor` over all nodes of a job: versions, reach, clocks, latency; each judges one fact (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.diagnose.doctor.checks import Check
from phalanx.diagnose.doctor.nodes import JobReport
from phalanx.diagnose.doctor.probe import LinkQuality
from phalanx.units import format_seconds

SKEW_S = 1.0
"""Difference of clocks from which logs of two nodes can no longer be read side by side."""


def examine(report: JobReport) -> list[Check]:
    """Return what is judged of all nodes together."""
    return [versions(report), names(report), reach(report), clocks(report)]


def versions(report: JobReport) -> Check:
    """Judge whether all nodes run the same releases."""
    differing = []
    for what in report.nodes[0].versions:
        nodes_of: dict[str, list[int]] = {}
        for node in report.nodes:
            nodes_of.setdefault(node.versions.get(what, "none"), []).append(node.node_rank)
        if len(nodes_of) > 1:
            where = "; ".join(f"{version} on node {', '.join(map(str, nodes))}" for version, nodes in nodes_of.items())
            differing.append(f"{what} {where}")
    if differing:
        advice = "Install the same versions on every node."
        # Ranks refuse to meet with other versions of these two; another Python usually works.
        state = "failed" if any(not text.startswith("python") for text in differing) else "warning"
        return Check(name="versions", state=state, observed=". ".join(differing), advice=advice)  # type: ignore[arg-type]
    same = ", ".join(f"{what} {version}" for what, version in report.nodes[0].versions.items())
    return Check(name="versions", state="ok", observed=same)


def names(report: JobReport) -> Check:
    """Judge whether nodes can be told apart by their names."""
    hosts = [node.host for node in report.nodes]
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        advice = "Messages name hosts: give each node a name of its own (hostnamectl set-hostname)."
        return Check(
            name="names", state="warning", observed=f"{', '.join(twice)} is the name of several", advice=advice
        )
    return Check(name="names", state="ok", observed="all differ")


def reach(report: JobReport) -> Check:
    """Judge whether every node reaches a port of every other one."""
    broken = [f"node {source} to node {target}: {link.error}" for source, target, link in _pairs(report) if link.error]
    if broken:
        advice = (
            "Ranks listen at ports that the system chooses: open all TCP ports between the nodes, or correct addresses "
            "and routes (--master-addr, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
        )
        return Check(name="reach", state="failed", observed="; ".join(broken), advice=advice)
    slowest = max((link.latency_s for _, _, link in _pairs(report)), default=0.0)
    return Check(
        name="reach", state="ok", observed=f"every node reaches every other, latency {format_seconds(slowest)}"
    )


def clocks(report: JobReport) -> Check:
    """Judge how far the clocks of the nodes are apart."""
    ahead = [
        (0.0, 0.0),
        *((link.clock_ahead_s, link.clock_error_s) for link in report.links[0] if link and not link.error),
    ]
    skew = max(at for at, _ in ahead) - min(at for at, _ in ahead)
    error = max(by for _, by in ahead)
    observed = f"{format_seconds(skew)} apart (± {format_seconds(error)})"
    if skew - error > SKEW_S:
        advice = "Let every node keep time (chronyd, systemd-timesyncd): logs, tokens and signed requests depend on it."
        return Check(name="clocks", state="warning", observed=observed, advice=advice)
    return Check(name="clocks", state="ok", observed=observed)


def _pairs(report: JobReport) -> Iterator[tuple[int, int, LinkQuality]]:
    for source, row in enumerate(report.links):
        for target, link in enumerate(row):
            if link is not None:
                yield source, target, link
