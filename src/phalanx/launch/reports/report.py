"""`render`: text of the launcher: banner, environment table, failure report."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Sequence

from phalanx.i18n import Labels, tr
from phalanx.launch.hang.verdict import Verdict
from phalanx.launch.process.source_files import path_for_user
from phalanx.launch.reports.root_cause import ProcessExit
from phalanx.launch.reports.terminal import columns_of, terminal_width, wrap_line

_SIGNALS: Labels = {
    "SIGKILL": ("killed from outside without warning, often by the kernel's out-of-memory killer (see dmesg)"),
    "SIGSEGV": "a memory error in native code; the Python stack at that moment is in the log",
    "SIGABRT": "native code gave up; its reason is in the log",
    "SIGBUS": "memory behind a mapping is gone: a full /dev/shm or disk, or a truncated file",
    "SIGTERM": "asked to end by someone other than this launcher",
    "SIGFPE": "an arithmetic error in native code",
    "SIGILL": "an instruction this processor does not have: a library built for another one",
}
"""What usually sends a signal, or what it is about."""


_WIDTH = 88
"""Columns of a frame; fewer in a terminal that has fewer."""

_TABLE_WIDTH = 87
"""Most columns between the table's borders."""


def banner(items: Sequence[tuple[str, str]]) -> str:
    """Return the `Configuration Arguments` block."""
    title = " Configuration Arguments "
    lines = [title.center(11 * 2 + len(title), "-")]
    lines += [f"{name}: {value}" for name, value in items]
    lines.append("-" * len(lines[0]))
    return "\n".join(lines) + "\n"


def environment_table(rows: Sequence[tuple[str, str]]) -> str:
    """Return the table of distributed environment variables, no wider than it must be; long values are cut."""
    names = max([len(name) for name, _ in rows] + [len("Distributed Envs")]) + 2
    widest = max([len(value) for _, value in rows] + [len("Value")])
    values = min(widest, _TABLE_WIDTH - names - 2)
    border, rule = (f"    +{line * (names + values + 2)}+" for line in "=-")
    lines = [border, _row("Distributed Envs", "Value", names, values), rule]
    lines += [_row(name, _shorten(value, values), names, values) for name, value in rows]
    return "\n".join([*lines, border]) + "\n"


def _row(name: str, value: str, names: int, values: int) -> str:
    return f"    | {name:<{names}}{value:>{values}} |"


def _shorten(value: str, width: int) -> str:
    if len(value) <= width:
        return value
    head = (width - 3) // 2
    return f"{value[:head]}...{value[-(width - 3 - head) :]}"


def describe_exit(process_exit: ProcessExit) -> str:
    """Return in words how a process ended, a signal with what usually sends it."""
    if process_exit.kind == "hang":
        return tr("hung: {why}", why=process_exit.error)
    if process_exit.code < 0:
        return _signal(-process_exit.code)
    if process_exit.error:
        return tr("raised {error}", error=process_exit.error)
    return (
        tr("ended early with exit code 0, while others still waited for it")
        if process_exit.code == 0
        else tr("ended with exit code {code}", code=process_exit.code)
    )


def describe_briefly(process_exit: ProcessExit) -> str:
    """Return how a process ended, in one short line."""
    if process_exit.code < 0:
        return f"was killed by {signal_name(-process_exit.code)}"
    if process_exit.error:
        return f"raised {process_exit.error.splitlines()[0]}"
    return f"ended with exit code {process_exit.code}"


def render_hang(verdict: Verdict, timeout_s: float) -> str:
    """Return the framed report of a job that is stalled.

    Args:
        verdict: What was found.
        timeout_s: Seconds to the end of the job; 0 for never.
    """
    width = _frame_width()
    lines = [_centred(f" {tr('the job is stalled')} ", width), *_wrap(verdict.lines[0], width)]
    lines += [part for line in verdict.lines[1:] for part in _fit(line)]
    if verdict.works:
        lines.append(tr("It works, so the job is not ended while it does. `phalanx why` looks again."))
    elif timeout_s:
        lines.append(tr("The job ends in {seconds:g} s unless it makes progress (--hang-timeout).", seconds=timeout_s))
    return "\n".join([*lines, "=" * width]) + "\n"


def _frame_width() -> int:
    return min(_WIDTH, terminal_width() or _WIDTH)


def _fit(line: str) -> list[str]:
    """Return the lines that one becomes in a terminal; in a file or a pipe it stays whole."""
    return [line] if terminal_width() is None else wrap_line(line, _frame_width())


def _wrap(text: str, width: int) -> list[str]:
    return [part for line in text.splitlines() for part in wrap_line(line, width, "")]


def fork_server_lost(pid: int, code: int) -> str:
    """Return in words that the fork server died, and how."""
    reason = _signal(-code) if code < 0 else tr("ended with exit code {code}", code=code)
    return tr(
        "the fork server (pid {pid}), from which every process of this host is started, {how}. They ended with it.",
        pid=pid,
        how=reason,
    )


def signal_name(number: int) -> str:
    """Return the name of a signal, or ? for one without."""
    return signal.Signals(number).name if number in set(signal.Signals) else "?"


def _signal(number: int) -> str:
    name = signal_name(number)
    message = tr("ended by signal {number} ({name})", number=number, name=name)
    return f"{message}: {tr(_SIGNALS[name])}" if name in _SIGNALS else message


def _centred(title: str, width: int) -> str:
    """The title in a rule; Chinese characters take two columns each."""
    return title.center(width - columns_of(title) + len(title), "=")


def render(first: ProcessExit, others: Sequence[ProcessExit]) -> str:
    """Return the framed report of a failed job, in the user's language.

    Args:
        first: The process that failed first.
        others: Exits of the other processes, one line each.
    """
    width = _frame_width()
    lines = [_centred(f" {tr('{title} failed first', title=first.title)} ", width)]
    lines += _fit(f"{first.title} {describe_exit(first)}")
    lines.append(tr("on {host}, pid {pid}", host=first.host, pid=first.pid))
    followers = [
        f"{e.title}: {describe_exit(e)}".splitlines()[0] for e in others if e.failed and e.title != first.title
    ]
    if followers:
        lines.append(f"{tr('the others followed')}:")
        # Of an early end they alone say what it was missing from.
        head = textwrap.wrap(followers[0], width) if first.code == 0 else [followers[0][:width]]
        lines += [f"    {line}" for line in (*head, *(line[:width] for line in followers[1:8]))]
        if len(followers) > 8:
            lines.append(f"    ... (+{len(followers) - 8})")
    if first.traceback:
        lines += ["", *first.traceback.rstrip("\n").split("\n")]
    elif first.last_lines:
        lines += ["", f"{tr('last lines of its log')}:", *(f"    {line}" for line in first.last_lines)]
    lines += ["", f"{tr('log file')}: {path_for_user(first.log_file)}", "=" * width]
    return "\n".join(lines) + "\n"
