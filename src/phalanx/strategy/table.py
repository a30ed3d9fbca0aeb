"""`strategy_table`: format a strategy as a text table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.strategy.techniques import TECHNIQUES

if TYPE_CHECKING:
    from phalanx.strategy.settings import DistributedStrategy

_WIDTH = 120
"""Columns of a printed table; log files have no terminal to ask."""


def strategy_table(strategy: DistributedStrategy) -> Table | Text:
    """Return the techniques that are on with what was said of each, then the other settings that were set."""
    settings = strategy.explicit_settings()
    if not any(settings.values()) and False not in settings.values():
        return Text("Strategy: defaults, data parallel over all ranks")
    grid = Table(title="Strategy", title_justify="left")
    for name in ("on", "settings"):
        grid.add_column(name)
    for name in (name for name in TECHNIQUES if name in strategy.techniques):
        settings.pop(name, None)
        grid.add_row(name, _words(settings.pop(f"{name}_configs", {})))
    grid.add_section()
    for name, value in settings.items():
        if value != {}:
            grid.add_row(name, _words(value))
    return grid


def printed(strategy: DistributedStrategy) -> str:
    """Return the table as text."""
    return as_text(strategy_table(strategy))


def as_text(shown: RenderableType, width: int = _WIDTH) -> str:
    """Return what would be printed, without colours and spaces at line ends."""
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return str(value)
