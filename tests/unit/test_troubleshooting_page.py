"""Messages on the page on troubleshooting are messages of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
OF_OTHERS = {"OutOfMemoryError"}
"""Messages of torch."""


@pytest.fixture(scope="module")
def source() -> str:
    """Return the code with strings that stand on several lines joined."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_there_are_enough_messages() -> None:
    assert len(MESSAGES) == len(set(MESSAGES)) > 30


@pytest.mark.parametrize("message", sorted(set(MESSAGES) - OF_OTHERS))
def test_the_code_has_every_message_of_the_page(message: str, source: str) -> None:
    assert [part for part in message.split("...") if part.strip(" ,") not in source] == []
