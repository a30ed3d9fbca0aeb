"""The command `phalanx env`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import click
from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from phalanx.cluster.env.settings import TABLE, Setting, markdown, shown_value
from phalanx.i18n import LANGUAGES, language

_LETTERS = {"read": "r", "written": "w", "read, written": "rw", "ignored": "-"}
_TABLE_WIDTH = 120
"""Columns of a terminal that a table of settings needs."""


@click.command(epilog="\b\nExample:\n  phalanx env --list")
@click.option("--list", "list_all", is_flag=True, help="Show every variable, not only those that are set.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list on standard output.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the page docs/settings.md.")
@click.option("--lang", type=click.Choice(LANGUAGES), help="Language of meanings. Default: from LANG.")
def env(list_all: bool, as_json: bool, as_markdown: bool, lang: str | None) -> None:
    """Show the environment variables that are read or written, and what they are set to.

    Secrets are masked.
    """
    if as_markdown:
        click.echo(markdown(), nl=False)
        return
    values = {s.name: shown_value(s.name, os.environ[s.name]) for s in TABLE if s.name in os.environ}
    chosen = [s for s in TABLE if list_all or as_json or s.name in values]
    if as_json:
        click.echo(
            json.dumps([asdict(s) | {"value": values.get(s.name)} for s in chosen], ensure_ascii=False, indent=1)
        )
        return
    if not chosen:
        click.echo(f"None of the {len(TABLE)} settings is set. `phalanx env --list` shows them all.")
        return
    terminal = console()
    as_text = _settings_table if terminal.width >= _TABLE_WIDTH else _settings_list
    terminal.print(as_text(chosen, values, lang or language()), highlight=False)


def _meaning(setting: Setting, lang: str) -> str:
    return setting.meaning_zh if lang == "zh" else setting.meaning_en


def _settings_list(chosen: Sequence[Setting], values: Mapping[str, str], lang: str) -> Group:
    """The settings for a narrow terminal: meanings below names, as a column would have ten letters for them."""
    parts: list[Text | Padding] = []
    family = ""
    for s in chosen:
        if s.family != family:
            family = s.family
            parts.append(Text(f"\n{family}", style="bold"))
        value = f"  = {values[s.name]}" if s.name in values else ""
        default = f"  [{s.default}]" if s.default else ""
        parts.append(Text(f"  {s.name}  {_LETTERS[s.access]}{value}{default}", overflow="fold"))
        parts.append(Padding(Text(_meaning(s, lang)), (0, 0, 0, 6)))
    return Group(*parts, Text("\nr read, w written, - ignored; = value now, [default]"))


def _settings_table(chosen: Sequence[Setting], values: Mapping[str, str], lang: str) -> Table:
    """One section per family, so that names stay whole on a narrow terminal."""
    table = Table(box=box.SIMPLE_HEAD, title="Settings", caption="r read, w written, - ignored")
    # Names are copied into shells and scripts: cut in the middle they are of no use.
    table.add_column("variable", no_wrap=True, min_width=max(len(s.name) for s in chosen))
    for heading in ("", "value", "default", "meaning"):
        table.add_column(heading, overflow="fold")
    family = ""
    for s in chosen:
        if s.family != family:
            family = s.family
            table.add_section()
            table.add_row(f"[bold]{family}[/]")
        table.add_row(s.name, _LETTERS[s.access], escape(values.get(s.name, "")), s.default, _meaning(s, lang))
    return table


def console() -> Console:
    """Return a terminal of its own width, or of COLUMNS; else wide enough that files keep every character."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=200)
