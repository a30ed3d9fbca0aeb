"""The man page is that of the commands as they are, in roff; shells can complete commands and flags."""

from __future__ import annotations

import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from click.shell_completion import BashComplete

from phalanx.cli.group import phalanx

FOLDER = Path(__file__).parents[2] / "docs" / "man"


@pytest.fixture(scope="module")
def man_page() -> ModuleType:
    spec = spec_from_loader("man_page", SourceFileLoader("man_page", str(FOLDER / "man_page.py")))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_commands(man_page: ModuleType) -> None:
    assert (FOLDER / "phalanx.1").read_text() == man_page.page(), "Run: python docs/man/man_page.py"


def test_it_is_roff_that_every_man_program_reads(man_page: ModuleType) -> None:
    lines = man_page.page().splitlines()
    known = {".TH", ".SH", ".SS", ".B", ".I", ".RI", ".TP", ".PP", ".nf", ".fi", '.\\"'}
    assert {line.split(" ")[0] for line in lines if line.startswith(".")} == known
    assert not [line for line in lines if "\b" in line or re.search(r"(?<!\\)--", line)]
    assert any(line.startswith(".SS phalanx job submit [OPTIONS]") for line in lines)


@pytest.mark.parametrize(
    ("words", "begun", "expected"), [([], "doc", {"doctor"}), (["run"], "--nproc", {"--nproc-per-node", "--nprocs"})]
)
def test_shells_complete_commands_and_flags(words: list[str], begun: str, expected: set[str]) -> None:
    complete = BashComplete(phalanx, {}, "phalanx", "_PHALANX_COMPLETE")
    assert {item.value for item in complete.get_completions(words, begun)} == expected
