"""CONTRIBUTING names files that are there, and stays short enough to read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PATHS = sorted(set(re.findall(r"`((?:[\w.]+/)*[\w.]+\.(?:py|cc|h|md|json))`", PAGE)))


def test_it_is_read_in_a_minute():
    assert len(PAGE.splitlines()) <= 70


@pytest.mark.parametrize("path", PATHS)
def test_every_file_it_names_is_there(path):
    assert (ROOT / path).exists() or (ROOT / "src" / "phalanx" / path).exists()
