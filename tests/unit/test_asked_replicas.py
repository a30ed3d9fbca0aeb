"""How many logical replicas launcher and script ask for."""

from __future__ import annotations

import pytest

from phalanx.parallel.data.replicas.replica_record import ReplicaRecord
from phalanx.parallel.distribute import asked_replicas
from phalanx.parallel.session import session
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.shape import ModelShape
from phalanx.strategy import DistributedStrategy


@pytest.mark.parametrize(
    ("script", "launched", "expected"),
    [(None, None, None), (None, "4", 4), (2, "4", 2), (None, "0", 0), (0, "4", 0), (4, "0", 4)],
)
def test_the_script_goes_before_the_launcher(
    monkeypatch: pytest.MonkeyPatch, script: int | None, launched: str | None, expected: int | None
) -> None:
    monkeypatch.setattr(session, "strategy", DistributedStrategy(logical_replicas=script))
    if launched is None:
        monkeypatch.delenv("PHALANX_REPLICAS", raising=False)
    else:
        monkeypatch.setenv("PHALANX_REPLICAS", launched)
    assert asked_replicas() == expected


def test_zero_replicas_are_none_in_the_plan() -> None:
    plan = plan_from_strategy(DistributedStrategy(logical_replicas=0), ModelShape(()), 2)
    assert plan.step.replicas is None


def test_records_of_older_saves_say_nothing_of_means() -> None:
    values = ReplicaRecord(4, 1, False).values()
    del values["has_means"]
    assert not ReplicaRecord.read(values, "step-1").has_means
