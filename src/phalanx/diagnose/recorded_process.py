"""`run_recorded`: run a command with its output in a file, and end it where it takes too long."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import LaunchError

_LINES = 25
_END_S = 15
"""How long a launcher may take to end its ranks."""


def run_recorded(
    command: Sequence[str],
    *,
    folder: str | Path,
    variables: Mapping[str, str],
    output: Path,
    timeout_s: float,
    title: str,
    advice: str,
) -> int:
    """Run a command to its end and return its exit code.

    Args:
        command: What to run.
        folder: Where it runs.
        variables: Its environment.
        output: File for all it prints.
        timeout_s: Seconds after which it is stopped.
        title: What to call it in the error.
        advice: What to do where it took too long.

    Raises:
        LaunchError: If it takes longer; with the last lines it printed.
    """
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"{title} did not end within {timeout_s:g} s. {advice} The last lines it printed:\n{last_lines(output)}"
            ) from None
        finally:
            _end(process)


def last_lines(output: Path) -> str:
    """Return the last lines that a command printed."""
    return "\n".join(output.read_text(errors="replace").rstrip().splitlines()[-_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # the launcher ends its ranks
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
