"""The generated parts of docs/strategy.md: every setting with its default, and which techniques go together.

`python -m phalanx.strategy.page docs/strategy.md` writes them between their marks.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from phalanx.strategy import configs, conflicts, settings
from phalanx.strategy.menu import WITHOUT_EFFECT


def fill_page(page: str) -> str:
    """Return the text of the page with its generated parts up to date."""
    for name, text in (("settings", settings_table()), ("pairs", conflicts.table())):
        page = re.sub(
            rf"(<!-- {name}: [^\n]* -->\n).*?(\n<!-- end of {name} -->)",
            lambda match, text=text: f"{match[1]}\n{text}\n{match[2]}",  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
    return page


def settings_table() -> str:
    """Return every setting, and every key of the dictionaries, as Markdown."""
    fields, described = (
        settings.DistributedStrategy.model_fields,
        _docstrings_of_fields(settings)["DistributedStrategy"],
    )
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    keys = [""]
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        lines.append(f"| `{name}` | `{default}` | {_cell(described.get(name) or _of_switch(name))} |")
        if name.endswith("_configs") and inspect.isclass(field.annotation) and field.annotation.__annotations__:
            keys += _keys_table(name, field.annotation)
    return "\n".join(lines + keys)


def _keys_table(dictionary: str, shape: type) -> list[str]:
    described = _docstrings_of_fields(configs)[shape.__name__]
    lines = ["", f"`{dictionary}`: {inspect.getdoc(shape)}", "", "| key | default and meaning |", "|---|---|"]
    for key in shape.__annotations__:
        idle = WITHOUT_EFFECT.get(dictionary, {}).get(key)
        meaning = f"Accepted, does not act: {idle}." if idle else described.get(key, "")
        lines.append(f"| `{key}` | {_cell(meaning)} |")
    return lines


def _docstrings_of_fields(module: ModuleType) -> dict[str, dict[str, str]]:
    """Return the strings below the fields of each class, which Python itself does not keep."""
    return {
        class_def.name: {
            field.target.id: inspect.cleandoc(text)
            for field, after in zip(class_def.body, class_def.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and (text := _text(after))
        }
        for class_def in ast.parse(inspect.getsource(module)).body
        if isinstance(class_def, ast.ClassDef)
    }


def _text(node: ast.stmt) -> str | None:
    """Return the string that a statement is, if it is one."""
    value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    return value if isinstance(value, str) else None


def _of_switch(name: str) -> str:
    return f"The keys of `{name.removesuffix('_configs')}`, below."


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(fill_page(path.read_text()))
