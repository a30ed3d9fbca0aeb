"""The banner and the tables the launcher prints. Pure text."""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH = 87


def banner(items: Sequence[tuple[str, str]]) -> str:
    """Return the `Configuration Arguments` block."""
    title = " Configuration Arguments "
    lines = [title.center(11 * 2 + len(title), "-")]
    lines += [f"{name}: {value}" for name, value in items]
    lines.append("-" * len(lines[0]))
    return "\n".join(lines) + "\n"


def environment_table(rows: Sequence[tuple[str, str]]) -> str:
    """Return the table of distributed environment variables; long values are cut in the middle."""
    names = max([len(name) for name, _ in rows] + [16]) + 2
    values = _WIDTH - names - 2
    border = f"    +{'=' * _WIDTH}+"
    lines = [border, _row("Distributed Envs", "Value", names, values), f"    +{'-' * _WIDTH}+"]
    lines += [_row(name, _cut(value, values), names, values) for name, value in rows]
    return "\n".join([*lines, border]) + "\n"


def _row(name: str, value: str, names: int, values: int) -> str:
    return f"    | {name:<{names}}{value:>{values}} |"


def _cut(value: str, width: int) -> str:
    if len(value) <= width:
        return value
    head = (width - 3) // 2
    return f"{value[:head]}...{value[-(width - 3 - head) :]}"
