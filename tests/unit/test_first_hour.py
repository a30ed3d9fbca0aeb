"""The scripts of `make first-hour`: two lines make one's own parallel, and each fault changes one line of it."""

from __future__ import annotations

import difflib
import sys

import pytest

from benchmarks.first_hour.scripts import FAULTS, OWN, Fault, parallel, scripts_of_page
from benchmarks.first_hour.step import StepError, Terminal, environment_of


def test_two_lines_make_the_script_parallel():
    lines = difflib.unified_diff(OWN.splitlines(), parallel(OWN).splitlines(), n=0, lineterm="")
    changes = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changes == [
        "+import phalanx as px",
        "+net, optimizer, loader = px.distribute(net, optimizer, loader)",
    ]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_one_line_that_python_compiles(fault: Fault) -> None:
    compile(fault.script(), fault.name, "exec")
    whole = parallel(OWN).splitlines()
    assert [line for line in fault.script().splitlines() if line not in whole] == [
        fault.script().splitlines()[fault.line() - 1]
    ]


def test_the_page_for_beginners_has_a_script_and_its_parallel_form():
    plain, converted = scripts_of_page("get-started.md")[:2]
    assert "phalanx" not in plain
    assert "px.distribute" in converted


def test_a_step_stores_its_output_and_fails_for_what_it_does_not_print(tmp_path):
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    terminal = Terminal(tmp_path, outputs, environment_of(tmp_path, tmp_path / "home"))
    command = f"{sys.executable} -c 'print(12)'"
    assert terminal.run("first", command, must_print=[r"^12$"]) == "12\n"
    assert (outputs / "01-first.txt").read_text() == f"$ {command}\n12\n"
    with pytest.raises(StepError, match="prints nothing like '13'"):
        terminal.run("second", command, must_print=["13"])
    with pytest.raises(StepError, match="ends with 0"):
        terminal.run("third", command, exit_code=2)
