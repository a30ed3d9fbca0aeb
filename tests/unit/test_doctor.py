"""Each fact about a machine gets the right judgement and a useful word."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from phalanx.diagnose import checks, facts
from phalanx.diagnose.checks import Check
from phalanx.diagnose.commands import doctor

GB = 1 << 30


@pytest.mark.parametrize(
    ("check", "state", "advice"),
    [
        (checks.python((3, 11)), "ok", ""),
        (checks.python((3, 10)), "failed", "Install Python 3.11"),
        (checks.torch_build("2.13.0", "no CUDA GPU"), "ok", ""),
        (checks.torch_build("2.4.1", ""), "failed", "Phalanx needs torch >=2.9,<2.14"),
        (checks.native_core(""), "ok", ""),
        (checks.native_core("no module"), "failed", "Reinstall phalanx"),
        (checks.loopback("", 0.1), "ok", ""),
        (checks.loopback("rank 0: refused", 0.1), "failed", "Check the loopback interface"),
        (checks.host_name("a", ["10.0.0.1"]), "ok", ""),
        (checks.host_name("a", ["127.0.1.1"]), "warning", "Other hosts cannot reach it under this name"),
        (checks.host_name("a", []), "warning", "Add the name to /etc/hosts"),
        (checks.shared_memory(8 * GB, 8 * GB), "ok", ""),
        (checks.shared_memory(8 * GB, GB // 2), "warning", "--shm-size=8g"),
        (checks.shared_memory(64 << 20, 32 << 20), "failed", "--shm-size=8g"),
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
        (checks.dead_flags({"RANK": "1"}), "ok", ""),
        (checks.dead_flags({"FLAGS_sync_nccl_allreduce": "1"}), "warning", "leave it out"),
    ],
)
def test_a_fact_is_judged_with_advice(check, state, advice):
    assert check.state == state
    assert advice in check.advice
    assert bool(check.advice) == (state != "ok")


def _with(monkeypatch: pytest.MonkeyPatch, *found: Check) -> None:
    monkeypatch.setattr(facts, "examine", lambda: iter(found))


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
