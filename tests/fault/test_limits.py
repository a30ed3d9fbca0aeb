"""Jobs with a rank that loses what it runs on: a data worker, the disk, the network; what the launcher says of it.

A quota of the processor is in `test_slow`.
"""

from __future__ import annotations

import pytest

from benchmarks.bench_doctor import ours, start
from benchmarks.doctor_faults import Fault
from benchmarks.doctor_limits import LIMITS
from benchmarks.doctor_trial import Trial, why_not

pytestmark = pytest.mark.fault


@pytest.mark.parametrize(
    "fault", [fault for fault in LIMITS if fault.verdict == "failure"], ids=lambda fault: fault.name
)
def test_the_rank_and_the_cause_are_named(fault: Fault) -> None:
    if reason := why_not(fault):
        pytest.skip(reason)
    outcome = ours(fault, 1.0)
    assert outcome.found == "line", outcome.said


def test_both_halves_of_a_job_whose_network_is_cut_end_and_name_the_other() -> None:
    """Also the half without the store, whose calls to it get no answer, and no error, for a quarter of an hour."""
    (fault,) = (fault for fault in LIMITS if fault.needs == "network")
    if reason := why_not(fault):
        pytest.skip(reason)
    with Trial(fault) as trial:
        start(trial, 1.0)
        assert trial.wait_until(lambda: trial.fault_at is not None), trial.output
        trial.wait_until(lambda: all(launcher.poll() is not None for launcher in trial.launchers), 30.0)
        assert [launcher.poll() for launcher in trial.launchers] == [1, 1], trial.output
        assert trial.seconds() < 25.0
        assert "(node 1) is gone" in trial.output
        assert "(node 0) is gone" in trial.output
