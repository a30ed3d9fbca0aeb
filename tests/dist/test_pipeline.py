"""A model cut into stages trains as one process does: losses, gradients, parameters and outputs compared."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline_models import FOUR, TWO, check, trained
from ranks import run_ranks

pytestmark = pytest.mark.dist


def trained_two() -> dict[str, Any]:
    return {name: trained(case) for name, case in TWO.items()}


def trained_four() -> dict[str, Any]:
    return {name: trained(case) for name, case in FOUR.items()}


def test_every_schedule_on_two_ranks_equals_one_process():
    ranks = run_ranks(trained_two, 2)
    for name, case in TWO.items():
        check([found[name] for found in ranks], case)


def test_copies_of_stages_and_four_stages_equal_one_process():
    ranks = run_ranks(trained_four, 4)
    for name, case in FOUR.items():
        check([found[name] for found in ranks], case)
