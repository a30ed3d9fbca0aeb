"""`fill_page`: generate the tables of docs/strategy.md.

`python -m phalanx.strategy.page docs/strategy.md` writes them between their marks.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from phalanx.strategy.configs import Configs
from phalanx.strategy.settings import DistributedStrategy, configs_of
from phalanx.strategy.techniques import conflict_table


def fill_page(page: str) -> str:
    """Return the text of the page with its generated parts up to date."""
    for name, text in (("settings", settings_table()), ("pairs", conflict_table())):
        page = re.sub(
            rf"(<!-- {name}: [^\n]* -->\n).*?(\n<!-- end of {name} -->)",
            lambda match, text=text: f"{match[1]}\n{text}\n{match[2]}",  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
    return page


def settings_table() -> str:
    """Return every setting, and every key of the dictionaries, as Markdown."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    keys = [""]
    for name, field in DistributedStrategy.model_fields.items():
        lines.append(f"| `{name}` | `{field.default}` | {_cell(field.description or _of_switch(name))} |")
        if (configs := configs_of(name)) is not None:
            keys += _keys_table(name, configs)
    return "\n".join(lines + keys)


def _keys_table(dictionary: str, configs: type[Configs]) -> list[str]:
    lines = ["", f"`{dictionary}`: {inspect.getdoc(configs)}", "", "| key | default | meaning |", "|---|---|---|"]
    reasons = configs.keys_without_effect()
    for key, field in configs.model_fields.items():
        default = "" if field.default is None else f"`{field.default}`"
        meaning = f"Accepted, has no effect: {reasons[key]}." if key in reasons else field.description
        lines.append(f"| `{key}` | {default} | {_cell(meaning)} |")
    return lines


def _of_switch(name: str) -> str:
    return f"The keys of `{name.removesuffix('_configs')}`, below."


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(fill_page(path.read_text()))
