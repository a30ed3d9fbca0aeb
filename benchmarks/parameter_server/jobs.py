"""Start the commands of one measurement side by side, and leave none of their processes behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = Path(__file__).parent
WORKERS = 2
OURS = [sys.executable, "-m", "phalanx.launch", "--server-num", "1", "--worker-num", str(WORKERS)]
"""Our launcher; a script and its arguments follow."""

TIMEOUT_S = 600.0


def run(commands: Sequence[Sequence[str]], folder: Path, settings: Mapping[str, str]) -> list[str]:
    """Run commands side by side until all have ended, and return what each said.

    Args:
        commands: The commands; each finds its number in `BENCH_WORKER`.
        folder: Where they run, `BENCH_FOLDER` to them.
        settings: More variables.

    Raises:
        RuntimeError: If one fails; has the end of what it said.
    """
    common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    common |= {"BENCH_FOLDER": str(folder), "BENCH_WORKERS": str(WORKERS), **settings}
    with ExitStack() as stack:
        running = []
        for index, command in enumerate(commands):
            said = stack.enter_context(open(folder / f"said-{index}", "w+"))
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | common | {"BENCH_WORKER": str(index)},
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            stack.callback(_end, process)
            running.append((process, said))
        return [_said(process, said) for process, said in running]


def results(folder: Path, name: str, count: int) -> list[dict[str, Any]]:
    """Return what workers left in files `<name>-<rank>.json`.

    Raises:
        RuntimeError: If there are not `count` of them.
    """
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]
    if len(found) != count:
        raise RuntimeError(f"{count} workers were to leave a {name}, {len(found)} did")
    return found


def _said(process: subprocess.Popen[bytes], said: IO[str]) -> str:
    code = process.wait(TIMEOUT_S)
    said.seek(0)
    text = said.read()
    if code:
        raise RuntimeError(f"{process.args!r} ended with {code}:\n{text[-4000:]}")
    return text


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a command: a launcher that failed may have left its servers."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
