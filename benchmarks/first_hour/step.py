"""`Terminal`: runs commands in an environment of its own, checks and stores what they print; `StepError` ends a run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class StepError(Exception):
    """A step did not do or say what it must."""


@dataclass(frozen=True)
class Step:
    """A step that passed: its command, and how long it took."""

    name: str
    command: str
    seconds: float
    lines: int


@dataclass
class Terminal:
    """Where commands are run one after the other.

    Attributes:
        folder: Working directory of the commands, with their scripts.
        outputs: Folder for the output of each step, `01-install.txt` first.
        environment: Of the commands.
        steps: Those that passed, in order.
    """

    folder: Path
    outputs: Path
    environment: Mapping[str, str]
    steps: list[Step] = field(default_factory=list)

    def run(
        self, name: str, command: str, *, must_print: Sequence[str] = (), exit_code: int = 0, limit_s: float = 600
    ) -> str:
        """Run a command, store what it prints, and check it.

        Args:
            name: Of the step.
            command: The words.
            must_print: Patterns that its output must match.
            exit_code: What it must end with; -1 for any code but 0.
            limit_s: Seconds that it may take.

        Returns:
            What it printed, on both streams, in order.

        Raises:
            StepError: If it ends otherwise, takes longer, or lacks one of the patterns.
        """
        began = time.monotonic()
        try:
            ended = subprocess.run(
                shlex.split(command), cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            self.write_output(name, command, str(error.output or ""))
            raise StepError(f"{command} takes longer than {limit_s:g} s") from None
        self.check(name, command, time.monotonic() - began, ended.stdout, must_print)
        if ended.returncode != exit_code and not (exit_code == -1 and ended.returncode > 0):
            raise StepError(f"{command} ends with {ended.returncode}:\n{ended.stdout[-2000:]}")
        return ended.stdout

    def check(self, name: str, command: str, seconds: float, text: str, must_print: Sequence[str] = ()) -> None:
        """Store the output of a step and check it; then the step has passed.

        Raises:
            StepError: If one of the patterns is not in it.
        """
        file = self.write_output(name, command, text)
        for pattern in must_print:
            if not re.search(pattern, text):
                raise StepError(f"{command} prints nothing like {pattern!r}; see {file}:\n{text[-2000:]}")
        self.steps.append(Step(name, command, seconds, text.count("\n")))
        sys.stdout.write(f"{seconds:7.1f} s  {name}\n")
        sys.stdout.flush()

    def write_output(self, name: str, command: str, text: str) -> Path:
        """Write the output of a step to its file; return that."""
        file = self.outputs / f"{len(self.steps) + 1:02d}-{name.replace(' ', '-')}.txt"
        file.write_text(f"$ {command}\n{text}")
        return file


def environment_of(tools: Path, home: Path) -> dict[str, str]:
    """Return an environment whose PATH begins with `tools`, and whose store of jobs is new."""
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith(("PHALANX_", "PYTHON", "VIRTUAL"))
    }
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    return plain | {"PATH": path, "PHALANX_HOME": str(home), "COLUMNS": "80", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
