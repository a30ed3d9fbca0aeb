"""README.zh.md shows what README.md shows: blocks and commands, which tests/dist/test_readme.py runs, and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))


def commands(text: str) -> list[str]:
    """Return the indented commands without the comments behind them."""
    return [line.partition(" #")[0].strip() for line in text.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize("pattern", [r"```\w+\n.*?```", r"^#+ ", r"!?\[[^\]]*\]\((?!README)([^)]+)\)", r"^- "])
def test_blocks_headings_links_and_points_are_those_of_the_english_page(pattern: str) -> None:
    english, chinese = (re.findall(pattern, text, re.DOTALL | re.MULTILINE) for text in (ENGLISH, CHINESE))
    assert english == chinese


def test_commands_are_those_of_the_english_page() -> None:
    assert commands(ENGLISH) == commands(CHINESE)
    assert "phalanx run -n 2 train.py" in commands(CHINESE)


@pytest.mark.parametrize("page", [ENGLISH, CHINESE])
def test_a_page_has_at_most_eight_links_and_each_leads_to_a_file(page: str) -> None:
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", page)
    assert len(links) <= 8
    assert [link for link in links if not (ROOT / link).exists()] == []
