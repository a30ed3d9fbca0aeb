"""Each fact about a machine gets the right judgement and a useful word."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.cluster.cgroup import ControlGroups
from phalanx.cluster.host_limits import HostLimits
from phalanx.diagnose.doctor import checks, facts, job_checks, resource_checks
from phalanx.diagnose.doctor.checks import Check
from phalanx.diagnose.doctor.command import doctor
from phalanx.diagnose.doctor.nodes import JobReport, NodeReport
from phalanx.diagnose.doctor.probe import LinkQuality
from phalanx.launch.request import preflight
from phalanx.launch.request.preflight import warnings

GB = 1 << 30


def limits(**said: Any) -> HostLimits:
    """Return the limits of a machine that has enough of everything, but for what is said."""
    usual = HostLimits(
        shared_memory=8 * GB,
        shared_memory_free=8 * GB,
        open_files=65536,
        open_files_most=65536,
        cores=8,
        cpu_quota=None,
        memory_limit=None,
        memory_used=0,
        disk_free=100 * GB,
    )
    return replace(usual, **said)


@pytest.mark.parametrize(
    ("check", "state", "advice"),
    [
        (checks.python((3, 11)), "ok", ""),
        (checks.python((3, 10)), "failed", "Install Python 3.11"),
        (checks.torch_build("2.13.0", "no CUDA GPU"), "ok", ""),
        (checks.torch_build("2.4.1", ""), "failed", "Phalanx needs torch >=2.13,<2.14"),
        (checks.native_core(""), "ok", ""),
        (checks.native_core("no module"), "failed", "Reinstall phalanx"),
        (checks.native_core("no module", installed=False), "warning", "C++20 compiler"),
        (checks.loopback("", 0.1), "ok", ""),
        (checks.loopback("rank 0: refused", 0.1), "failed", "Check the loopback interface"),
        (checks.host_name("a", ["10.0.0.1"]), "ok", ""),
        (checks.host_name("a", ["127.0.1.1"]), "warning", "Other hosts cannot reach it under this name"),
        (checks.host_name("a", []), "warning", "Add the name to /etc/hosts"),
        (checks.shared_memory(8 * GB, 8 * GB), "ok", ""),
        (checks.shared_memory(8 * GB, GB // 2), "warning", "--shm-size=8g"),
        (checks.shared_memory(64 << 20, 64 << 20), "warning", "--shm-size=8g"),
        (checks.shared_memory(64 << 20, 4096), "failed", "--shm-size=8g"),
        (checks.shared_memory(None, 0), "failed", "Mount a tmpfs at /dev/shm"),
        (checks.open_files(65536, 65536), "ok", ""),
        (checks.open_files(1024, 8192), "warning", "ulimit -n 8192"),
        (checks.open_files(64, 1 << 20), "failed", "ulimit -n 65536"),
        (checks.ports(32768, 60999, ""), "ok", ""),
        (checks.ports(32768, 32800, ""), "warning", "Widen the range"),
        (checks.ports(1, 65535, "no port can be bound"), "failed", "Allow this user"),
        (checks.threads(None, 4), "ok", ""),
        (checks.threads("4", 4), "ok", ""),
        (checks.threads("8", 4), "warning", "its share of the cores"),
        (checks.threads("many", 4), "warning", "Set it to a number"),
        (checks.compiler("/usr/bin/g++"), "ok", ""),
        (checks.compiler(None), "warning", "Install g++"),
        (resource_checks.cpu_limit(limits()), "ok", ""),
        (resource_checks.cpu_limit(limits(cpu_quota=8.0)), "ok", ""),
        (resource_checks.cpu_limit(limits(cpu_quota=1.5)), "warning", "OMP_NUM_THREADS=1 for one rank"),
        (resource_checks.memory_limit(limits(), 8 * GB), "ok", ""),
        (resource_checks.memory_limit(limits(memory_limit=8 * GB), 64 * GB), "ok", ""),
        (
            resource_checks.memory_limit(limits(memory_limit=3 * GB, memory_used=2 * GB), 64 * GB),
            "warning",
            "1 GiB are",
        ),
        (resource_checks.disk("/x", 50 * GB), "ok", ""),
        (resource_checks.disk("/x", GB), "warning", "--log-dir"),
        (resource_checks.disk("/x", 1 << 20), "failed", "Make room"),
        (resource_checks.devices(0, (), ""), "ok", ""),
        (resource_checks.devices(2, ("0", "1"), ""), "ok", ""),
        (resource_checks.devices(2, (), "CUDA_VISIBLE_DEVICES="), "warning", "Unset CUDA_VISIBLE_DEVICES"),
        (resource_checks.devices(2, (), ""), "warning", "built with CUDA"),
        (resource_checks.interfaces({}, ["lo", "eth0"]), "ok", ""),
        (resource_checks.interfaces({"NCCL_SOCKET_IFNAME": "eth"}, ["lo", "eth0"]), "ok", ""),
        (resource_checks.interfaces({"NCCL_SOCKET_IFNAME": "^docker"}, ["lo", "eth0"]), "ok", ""),
        (resource_checks.interfaces({"NCCL_SOCKET_IFNAME": "=eth"}, ["lo", "eth0"]), "failed", "names eth, which"),
        (resource_checks.interfaces({"GLOO_SOCKET_IFNAME": "eth"}, ["lo", "eth0"]), "failed", "names eth, which"),
        (resource_checks.route("eth0", "10.0.0.2"), "ok", ""),
        (resource_checks.route(None, ""), "warning", "`ip route` shows"),
        (checks.dead_flags({"RANK": "1"}), "ok", ""),
        (checks.dead_flags({"FLAGS_sync_nccl_allreduce": "1"}), "warning", "leave it out"),
    ],
)
def test_a_fact_is_judged_with_advice(check, state, advice):
    assert check.state == state
    assert advice in check.advice
    assert bool(check.advice) == (state != "ok")


def _with(monkeypatch: pytest.MonkeyPatch, *found: Check) -> None:
    monkeypatch.setattr(facts, "examine", lambda *towards: iter(found))


def test_the_command_fails_when_a_check_fails(monkeypatch):
    _with(monkeypatch, checks.python((3, 11)), checks.native_core("no module named phalanx._core"))
    result = CliRunner().invoke(doctor, [])
    assert result.exit_code == 1
    assert "1 ok, warnings: 0, failed: 1" in result.output
    assert "Reinstall phalanx" in result.output


def test_warnings_do_not_fail_the_command(monkeypatch):
    _with(monkeypatch, checks.compiler(None))
    result = CliRunner().invoke(doctor, ["--json"])
    assert result.exit_code == 0
    assert json.loads(result.output) == {
        "ok": True,
        "checks": [
            {"name": "c++ compiler", "state": "warning", "found": "none", "advice": checks.compiler(None).advice}
        ],
    }


def test_a_node_of_a_job_needs_its_place():
    for words in (["--nnodes", "2"], ["--nnodes", "2", "--master-addr", "a", "--node-rank", "2"], ["--network"]):
        result = CliRunner().invoke(doctor, words)
        assert result.exit_code == 2, result.output
        assert "--master-addr" in result.output


# --- all nodes of a job -----------------------------------------------------------------------------------------------

GOOD = LinkQuality(latency_s=1e-4, clock_ahead_s=0.01, clock_error_s=1e-4)


def job(there: LinkQuality = GOOD, *, torch: str = "2.13.0", python: str = "3.11.2", host: str = "b") -> JobReport:
    """Return the report of two nodes, of which the second differs as is said."""
    common = {"address": "10.0.0.1", "port": 1, "checks": (checks.python((3, 11)),)}
    versions = {"phalanx": "0.1", "torch": "2.13.0", "python": "3.11.2"}
    one = NodeReport(node_rank=0, host="a", versions=versions, **common)
    other = NodeReport(node_rank=1, host=host, versions={**versions, "torch": torch, "python": python}, **common)
    return JobReport(nodes=(one, other), links=((None, there), (GOOD, None)))


@pytest.mark.parametrize(
    ("report", "name", "state", "text"),
    [
        (job(), "versions", "ok", "torch 2.13.0"),
        (job(), "names", "ok", "all differ"),
        (job(), "reach", "ok", "latency 100 µs"),
        (job(), "clocks", "ok", "10 ms apart"),
        (job(torch="2.12.0"), "versions", "failed", "torch 2.13.0 on node 0; 2.12.0 on node 1"),
        (job(python="3.12.1"), "versions", "warning", "3.12.1 on node 1"),
        (job(host="a"), "names", "warning", "a is the name of several"),
        (job(LinkQuality(error="10.0.0.2:5 cannot be reached (no answer)")), "reach", "failed", "node 0 to node 1"),
        (job(replace(GOOD, clock_ahead_s=-90.0)), "clocks", "warning", "90 s apart"),
        (job(replace(GOOD, clock_ahead_s=2.0, clock_error_s=1.5)), "clocks", "ok", "2 s apart"),
    ],
)
def test_nodes_are_judged_together(report: JobReport, name: str, state: str, text: str) -> None:
    check = next(check for check in job_checks.examine(report) if check.name == name)
    assert check.state == state
    assert text in check.observed
    assert bool(check.advice) == (state != "ok")


# --- limits of containers ---------------------------------------------------------------------------------------------


def groups_of(root: Path, files: dict[str, str], membership: str) -> ControlGroups:
    for name, text in {"cgroup": membership, **{f"fs/{name}": text for name, text in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    kinds = {"cgroup2": root / "fs", "cpu,cpuacct": root / "fs" / "cpu", "memory": root / "fs" / "memory"}
    mounts = [
        f"4{n} 31 0:3{n} / {point} rw,relatime - "
        + ("cgroup2 cgroup2 rw" if kind == "cgroup2" else f"cgroup cgroup rw,{kind}")
        for n, (kind, point) in enumerate(kinds.items())
    ]
    (root / "mountinfo").write_text("\n".join(mounts) + "\n")
    return ControlGroups(root)


@pytest.mark.parametrize(
    ("files", "membership", "quota"),
    [
        ({"cpu.max": "150000 100000"}, "0::/", 1.5),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 2.0),
        ({"cpu.max": "50000 100000"}, "0::/not/seen/here", 0.5),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/\n0::/", 3.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/x", None),
        ({}, "0::/", None),
        ({"cpu.max": ""}, "0::/", None),
    ],
)
def test_the_quota_of_cores_is_read(
    tmp_path: Path, files: dict[str, str], membership: str, quota: float | None
) -> None:
    assert groups_of(tmp_path, files, membership).cores() == quota


@pytest.mark.parametrize(
    ("files", "membership", "limit"),
    [
        (
            {"memory.max": "1000", "memory.current": "600", "memory.stat": "anon 5\ninactive_file 100"},
            "0::/",
            (1000, 500),
        ),
        ({"memory.max": "max", "memory.current": "600"}, "0::/", (None, 0)),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, "4:memory:/", (None, 0)),
        ({"memory/x/memory.limit_in_bytes": "800", "memory/x/memory.usage_in_bytes": "5"}, "4:memory:/x", (800, 5)),
    ],
)
def test_the_limit_of_memory_is_read(tmp_path: Path, files: dict[str, str], membership: str, limit: object) -> None:
    assert groups_of(tmp_path, files, membership).memory_limit() == limit


# --- before every start -----------------------------------------------------------------------------------------------


def test_a_system_that_shows_no_limits_is_started_on(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "not here")

    monkeypatch.setattr(os, "statvfs", refuse)
    assert preflight.look({}) == []


@pytest.mark.parametrize(
    ("said", "environment", "text"),
    [
        ({}, {}, None),
        ({}, {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0"}, None),
        ({"cpu_quota": 1.0}, {"OMP_NUM_THREADS": "1"}, None),
        (
            {"shared_memory": 64 << 20, "shared_memory_free": 64 << 20},
            {},
            "/dev/shm has 64 MiB free. Ranks do not need",
        ),
        ({"shared_memory": None, "shared_memory_free": 0}, {}, "docker run --shm-size=8g"),
        ({"open_files": 256}, {}, "may open 256 files only; .* ulimit -n 65536"),
        ({"cpu_quota": 1.0}, {}, "gets 1 cores' time, and 8 cores are seen"),
        ({"memory_limit": GB, "memory_used": GB - 1}, {}, r"may use 1 GiB of memory, and .* killed \(SIGKILL\)"),
        ({}, {"GLOO_SOCKET_IFNAME": "eth"}, "GLOO_SOCKET_IFNAME=eth names eth; this host has lo, eth0"),
    ],
)
def test_a_start_warns_of_what_it_may_fail_by(said: dict[str, Any], environment: dict[str, str], text: str | None):
    found = list(warnings(limits(**said), environment, ["lo", "eth0"]))
    assert len(found) == (text is not None)
    if text is not None:
        assert re.search(text, found[0])
