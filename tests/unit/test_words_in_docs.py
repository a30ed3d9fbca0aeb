"""Every name of ours that README, CHANGELOG and the pages in docs/ write, exists."""

import importlib
import re
from pathlib import Path

import pytest

import phalanx as px
from phalanx import fleet

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOTS = {"px": px, "phalanx": px, "fleet": fleet, "strategy": fleet.DistributedStrategy()}
OLD = {"fleet.util.get_file_shard", "strategy.auto", "phalanx.fluid", "phalanx.optimizer.Momentum"}
"""What only older scripts say."""


def has(name: str) -> bool:
    first, *rest = name.split(".")
    found = ROOTS[first]
    for position, word in enumerate(rest, start=1):
        if not hasattr(found, word):
            try:
                importlib.import_module(".".join(["phalanx", *rest[:position]]))
            except ImportError:
                return False
        found = getattr(found, word)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_on_the_page_exists(page: Path) -> None:
    names = set(re.findall(r"(?<![\w./-])(?:px|phalanx|fleet|strategy)(?:\.[A-Za-z_]\w*)+", page.read_text())) - OLD
    assert [name for name in sorted(names) if not has(name)] == []
