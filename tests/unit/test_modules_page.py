"""The page of modules names what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design" / "modules.md").read_text()
SOURCE = ROOT / "src" / "phalanx"
NAMED = set(re.findall(r"`((?:auto|cluster|comm|plan|data|parallel|checkpoint|train|diagnose|cli|launch)/\w+)`", PAGE))


def test_every_module_named_is_there() -> None:
    assert len(NAMED) > 60
    assert not {name for name in NAMED if not (SOURCE / f"{name}.py").exists()}


@pytest.mark.parametrize(
    "package", ["auto", "cluster", "comm", "plan", "parallel", "checkpoint", "train", "diagnose", "launch"]
)
def test_every_module_is_named(package: str) -> None:
    there = {f"{package}/{path.stem}" for path in (SOURCE / package).glob("[!_]*.py")}
    assert there <= NAMED, there - NAMED
