"""What the launcher prints: the banner, the tables, and of a failed job who, how and where to read on. Pure text."""

from __future__ import annotations

import signal
import textwrap
import unicodedata
from collections.abc import Sequence

from phalanx.cluster.messages.messages import TABLE, text
from phalanx.launch.job.logs import relative_path
from phalanx.launch.job.root_cause import ProcessExit

_WIDTH = 88
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
    if process_exit.code < 0:
        return _signal(-process_exit.code)
    if process_exit.error:
        return text("raised", error=process_exit.error)
    return text("ended early") if process_exit.code == 0 else text("ended with code", code=process_exit.code)


def fork_server_lost(pid: int, code: int) -> str:
    """Return in words that the fork server died, and how."""
    reason = _signal(-code) if code < 0 else text("ended with code", code=code)
    return text("fork server lost", pid=pid, how=reason)


def _signal(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else "?"
    message = text("ended by signal", number=number, name=name)
    return f"{message}: {text(name)}" if name in TABLE else message


def _centred(title: str) -> str:
    """The title in a rule; Chinese characters take two columns each."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in title)
    return title.center(_WIDTH - wide, "=")


def render(first: ProcessExit, others: Sequence[ProcessExit]) -> str:
    """Return the framed report of a failed job, in the user's language.

    Args:
        first: The process that failed first.
        others: Exits of the other processes, one line each.
    """
    lines = [_centred(f" {text('failed first', title=first.title)} ")]
    lines.append(f"{first.title} {describe_exit(first)}")
    lines.append(text("where", host=first.host, pid=first.pid))
    followers = [
        f"{e.title}: {describe_exit(e)}".splitlines()[0] for e in others if e.failed and e.title != first.title
    ]
    if followers:
        lines.append(f"{text('others followed')}:")
        # Of an early end they alone say what it was missing from.
        head = textwrap.wrap(followers[0], _WIDTH) if first.code == 0 else [followers[0][:_WIDTH]]
        lines += [f"    {line}" for line in (*head, *(line[:_WIDTH] for line in followers[1:8]))]
        if len(followers) > 8:
            lines.append(f"    ... (+{len(followers) - 8})")
    if first.traceback:
        lines += ["", *first.traceback.rstrip("\n").split("\n")]
    elif first.last_lines:
        lines += ["", f"{text('last lines')}:", *(f"    {line}" for line in first.last_lines)]
    lines += ["", f"{text('log file')}: {relative_path(first.log_file)}", "=" * _WIDTH]
    return "\n".join(lines) + "\n"
