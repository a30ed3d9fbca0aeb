"""The page of modules is what `make docs` writes, and folders stay of a size to survey."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "phalanx"
PAGE = ROOT / "docs" / "design" / "modules.md"
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py") if "migrations" not in path.parts)
LARGEST_FOLDER = 13


def test_the_page_is_current() -> None:
    render = runpy.run_path(str(PAGE.with_name("modules_page.py")))["render"]
    assert render(PAGE.read_text()) == PAGE.read_text(), "run make docs"


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_folder_says_what_it_is_and_stays_small(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert len([path for path in folder.glob("*.py") if path.stem != "__init__"]) <= LARGEST_FOLDER
