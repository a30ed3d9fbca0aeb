"""The doctor looks at the machine the tests run on, sockets included."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from phalanx.diagnose.doctor.command import doctor
from phalanx.diagnose.doctor.facts import all_reduce_between_threads

pytestmark = pytest.mark.dist


def test_two_ranks_in_two_threads_all_reduce_for_real():
    assert all_reduce_between_threads() == ""


def test_an_interface_that_does_not_exist_is_reported_not_raised(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert "nowhere0" in all_reduce_between_threads(timeout_s=2.0)


def test_this_machine_can_train():
    result = CliRunner().invoke(doctor, ["--json"])
    report = json.loads(result.output)
    assert report["ok"], report
    assert result.exit_code == 0
    assert {c["name"] for c in report["checks"]} >= {"python", "torch", "native core", "gloo all-reduce", "/dev/shm"}
