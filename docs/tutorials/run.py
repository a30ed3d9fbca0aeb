"""Run notebooks and write what their cells print into them; `--check` compares with what they hold.

python docs/tutorials/run.py [--check] docs/tutorials/*.ipynb

Cells are Python, with the two words of Jupyter that the notebooks use: lines of `!command`, and `%%writefile NAME`.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def run_cells(sources: list[str]) -> list[str]:
    """Run cells one after the other in this process and the current folder; return what each prints."""
    names: dict[str, Any] = {"__name__": "__main__", "_shell": _shell}
    return [_run_cell(source, number, names) for number, source in enumerate(sources, start=1)]


def _run_cell(source: str, number: int, names: dict[str, Any]) -> str:
    if found := re.fullmatch(r"%%writefile (\S+)\n(.*)", source, re.DOTALL):
        Path(found[1]).write_text(found[2] + "\n")
        return f"Writing {found[1]}\n"
    python = re.sub(r"^!(.+)$", lambda line: f"_shell({line[1]!r})", source, flags=re.MULTILINE)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(python, f"cell {number}", "exec"), names)
    return out.getvalue()


def _shell(command: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    arguments = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(arguments, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    print(done.stdout, end="")


def is_alike(printed: str, held: str) -> bool:
    """Return whether two texts are equal, but for what other processors round: 0.02 of fractions, 2 of counts."""
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(held), strict=False)
    close = all(math.isclose(float(a), float(b), rel_tol=0.02, abs_tol=0.02 if "." in b else 2) for a, b in pairs)
    return close and NUMBER.sub("", printed) == NUMBER.sub("", held)


def renew(path: Path, check: bool) -> None:
    """Run a notebook in a folder of its own, and write its outputs or compare them.

    Raises:
        SystemExit: If a command of a cell fails, or a cell prints something else than the notebook holds.
    """
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        printed = run_cells(["".join(cell["source"]) for cell in cells])
    for number, (cell, text) in enumerate(zip(cells, printed, strict=True), start=1):
        held = "".join(line for output in cell["outputs"] for line in output["text"])
        if check and not is_alike(text, held):
            raise SystemExit(f"{path}: code cell {number} prints\n{text}\nand the notebook holds\n{held}")
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell.update(execution_count=number, outputs=[stream] if text else [])
    if not check:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=lambda name: Path(name).resolve())
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for notebook in args.notebooks:
        renew(notebook, args.check)
