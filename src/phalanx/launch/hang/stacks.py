"""`read_stacks`: the Python stacks of another process, by py-spy from outside or a signal that the rank answers.

py-spy reads memory, so it works where the interpreter lock is held, in C, and where the process is stopped. It needs
the right to trace, which containers and Yama may refuse; ranks of our launcher grant it to the launcher.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.cluster import proc
from phalanx.launch.rank.activity import file_of
from phalanx.launch.rank.reporter import STACKS, STACKS_SIGNAL

TIMEOUT_S = 10.0
_ANSWER_S = 1.0
"""How long a rank may take to write its stacks. A stopped one never does."""

_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)")
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadStack:
    """A thread, its innermost frame first."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool
    holds_lock: bool = False
    """Whether it holds the interpreter lock; known to py-spy alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    """The stacks of a process, or why they could not be read."""

    threads: tuple[ThreadStack, ...] = ()
    problem: str = ""
    is_lock_known: bool = False
    """Whether `holds_lock` of the threads means something."""

    @property
    def main_holds_lock(self) -> bool:
        """Whether the main thread holds the interpreter lock."""
        return any(thread.is_main and thread.holds_lock for thread in self.threads)

    @property
    def main(self) -> tuple[Frame, ...]:
        """Frames of the main thread, innermost first; empty where they are not known."""
        return next((thread.frames for thread in self.threads if thread.is_main), ())


def read_stacks(pid: int, *, is_stopped: bool = False) -> Stacks:
    """Return the stacks of a process; a problem is said in them, not raised.

    Args:
        pid: The process; it is not changed, and hardly slowed down.
        is_stopped: Whether it is stopped (state T), so that no signal would be answered, and tracing is refused.
    """
    problem = "py-spy is not installed (pip install py-spy)"
    if (program := _spy()) is not None:
        # Read beside the process first, as a waiting one does not change; one that runs may have to be halted.
        for options in [("--nonblocking",)] * 3 + ([] if is_stopped else [()]):
            threads, problem = _spied(program, pid, options)
            if any(thread.is_main and thread.frames for thread in threads):
                return Stacks(threads=threads, is_lock_known=True)
    if not is_stopped and (threads := _signalled(pid)):
        return Stacks(threads=threads)
    return Stacks(problem=problem)


def _spy() -> str | None:
    beside = os.path.join(sysconfig.get_path("scripts"), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _spied(program: str, pid: int, options: Sequence[str]) -> tuple[tuple[ThreadStack, ...], str]:
    command = [program, "dump", "--json", *options, "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
        threads = tuple(_spied_thread(pid, thread) for thread in json.loads(done.stdout or b"[]"))
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return (), f"py-spy: {error}"
    return threads, f"py-spy: {_reason(done.stderr.decode(errors='replace'))}"


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip() and "Stack backtrace" not in line]
    text = next((line for line in lines if "ermission" in line or "not permitted" in line), lines[0] if lines else "")
    if "ermission" in text or "not permitted" in text:
        return f"{text} (needs the right to trace: run as root, or sysctl kernel.yama.ptrace_scope=0)"
    return text


def _spied_thread(pid: int, values: dict[str, Any]) -> ThreadStack:
    frames = [Frame(file=f["filename"] or "", line=f["line"], function=f["name"]) for f in values["frames"]]
    return ThreadStack(
        name=values["thread_name"] or "",
        frames=tuple(frames),
        is_main=values["os_thread_id"] == pid,
        holds_lock=bool(values["owns_gil"]),
    )


def _signalled(pid: int) -> tuple[ThreadStack, ...]:
    """Have the process write its stacks, if it is a rank that prepared for that."""
    if not _catches(pid, STACKS_SIGNAL):
        return ()
    try:
        path = file_of(pid, STACKS)
        os.truncate(path, 0)
        os.kill(pid, STACKS_SIGNAL)
        deadline = time.monotonic() + _ANSWER_S
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.02)
            with open(path, encoding="utf-8", errors="replace") as file:
                before, text = text, file.read()
            if text and text == before:
                break
    except OSError:
        return ()
    return parse_dump(text)


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which would end it otherwise."""
    return bool(int(proc.status(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def parse_dump(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads of a dump of `faulthandler`, which writes the main thread last."""
    blocks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            blocks.append((thread[2], []))
        elif blocks and (match := _LINE.match(line)):
            blocks[-1][1].append(Frame(file=match[1], line=int(match[2]), function=match[3]))
    last = len(blocks) - 1
    return tuple(
        ThreadStack(name=name, frames=tuple(frames), is_main=number == last)
        for number, (name, frames) in enumerate(blocks)
    )
