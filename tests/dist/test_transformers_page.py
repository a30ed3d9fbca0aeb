"""The code on the page about transformers runs, on one process and on two ranks, with the same results."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


def run_page() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    blocks = re.findall(r"(?:^    .*\n|(?<=\n)\n(?=    ))+", PAGE.read_text(), re.M)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile("\n".join(re.sub(r"^    ", "", block, flags=re.M) for block in blocks), "page", "exec"), names)
    return {
        "step": names["out"].loss.item(),
        "acc1": names["result"]["acc1"],
        "loss": names["loss"],
        "own": names["result"]["loss"],
        "rows": tuple(names["outputs"]["logits"].shape),
    }


def test_the_page_runs_and_says_the_same_on_two_ranks() -> None:
    one = run_ranks(run_page, 1)[0]
    first, second = run_ranks(run_page, 2)
    assert one["rows"] == first["rows"] == (64, 2)
    assert one["loss"] == pytest.approx(one["own"], rel=1e-5)
    assert first["loss"] == pytest.approx(one["loss"], rel=0.2)  # each rank draws its own dropout
    assert {name: first[name] for name in ("acc1", "loss", "own")} == {
        name: second[name] for name in ("acc1", "loss", "own")
    }
