"""Tables of `phalanx job`: what is copied from one is in it whole."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from phalanx.cli.job_tables import print_checkpoints
from phalanx.jobs.attempt.checkpoints import SavedCheckpoint


def test_the_name_of_a_checkpoint_is_whole_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    name = "experiments-of-november/step-000000012000"
    saved = datetime(2026, 11, 1, tzinfo=UTC)
    print_checkpoints([SavedCheckpoint(name, 12000, saved, 2**30, "complete", "")])
    assert any(line.split()[:1] == [name] for line in capsys.readouterr().out.splitlines())
