"""`phalanx scale-servers`: what it makes of a launcher's answers."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.errors import LaunchError
from phalanx.launch.cli import scale_servers_command


def test_a_job_that_is_started_again_in_the_middle_has_no_outcome_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"scale": "2 servers -> 3 servers", "scaling": "", "scaled": "{}"}
    job: dict[str, Any] = {"control": "job.sock", "mode": "ps", "job_id": "4f2a"}
    monkeypatch.setattr(scale_servers_command, "find_job", lambda name: job)
    monkeypatch.setattr(scale_servers_command, "ask", lambda path, command: answers[command["servers"]])
    result = CliRunner().invoke(scale_servers_command.command, ["4f2a", "3"])
    assert isinstance(result.exception, LaunchError)
    assert "started again in the middle of the change. `phalanx ps` shows" in str(result.exception)
