"""The page on examples lists every example and tutorial, and its commands use flags that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "examples.md").read_text()
LINKED = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", PAGE)}
SCRIPTS = {path for path in (ROOT / "examples").glob("*/*.py") if 'print("RESULT' in path.read_text()}


def test_the_page_links_every_example_and_tutorial_and_nothing_else() -> None:
    assert len(SCRIPTS) >= 9
    assert SCRIPTS | set((ROOT / "docs" / "tutorials").glob("*.ipynb")) == LINKED
    assert "docs/examples.md" in (ROOT / "README.md").read_text()


def test_commands_use_flags_of_the_scripts() -> None:
    commands = re.findall(r"^    phalanx run -n 2 (\S+)(.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for script, flags in commands:
        text = (ROOT / script).read_text()
        assert all(f'"{flag}"' in text for flag in re.findall(r"--[\w-]+", flags))
