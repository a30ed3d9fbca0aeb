"""The notebooks of docs/tutorials run from their first cell to their last, and print what they hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def check(*notebooks: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "run.py"), "--check", *map(str, notebooks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other cost more than they save
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_prints_what_it_holds(notebook: Path) -> None:
    done = check(notebook)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("print('loss 0.50 after 44 steps')", "code cell 1 prints\nloss 0.50 after 44 steps\n"),
        ("print('loss 0.31 after 50 steps')", "code cell 1 prints\nloss 0.31 after 50 steps\n"),
        ("!ls nowhere", "ls nowhere ended with 2"),
    ],
)
def test_another_output_and_a_command_that_fails_are_told(tmp_path: Path, source: str, told: str) -> None:
    cell = {"cell_type": "code", "source": [source], "outputs": [{"text": ["loss 0.31 after 44 steps\n"]}]}
    notebook = tmp_path / "one.ipynb"
    notebook.write_text(json.dumps({"cells": [cell]}))
    done = check(notebook)
    assert done.returncode == 1
    assert told in done.stderr


def test_links_of_the_tutorials_lead_somewhere() -> None:
    assert len(NOTEBOOKS) == 3
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text())["cells"]
        text = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
        targets = [part.partition(")")[0] for part in text.split("](")[1:]]
        assert targets
        assert all((FOLDER / target).exists() for target in targets)
