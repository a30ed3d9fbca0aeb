"""Write the list of modules in modules.md from the docstrings of the modules."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "phalanx"
PAGE = Path(__file__).with_name("modules.md")
BEGIN, END = "<!-- modules: written by make docs -->\n", "<!-- end of modules -->"
FIRST = ["plan", "parallel", "comm", "data", "train", "checkpoint", "auto", "ps", "launch", "jobs"]
"""Packages in the order to read them; the others follow."""


def render(page: str) -> str:
    """Return the text of the page with its list written anew."""
    packages = sorted({path.parent.relative_to(SOURCE) for path in SOURCE.rglob("__init__.py")}, key=_place)
    listed = "\n".join(_section(package) for package in packages if "migrations" not in package.parts)
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{listed}{END}{rest.partition(END)[2]}"


def _place(package: Path) -> tuple[int, str]:
    name = package.parts[0] if package.parts else ""
    return (FIRST.index(name) + 1 if name in FIRST else len(FIRST) + 1 if name else 0, str(package))


def _section(package: Path) -> str:
    title = "phalanx" if package == Path() else str(package)
    lines = [
        f"\n## {title}\n",
        _docstring(SOURCE / package / "__init__.py"),
        "",
        "| module | what it is for |",
        "|---|---|",
    ]
    modules = sorted(path for path in (SOURCE / package).glob("*.py") if path.stem != "__init__")
    lines += [f"| `{path.stem}` | {_first_line(path)} |" for path in modules]
    return "\n".join(lines if modules else lines[:2]) + "\n"


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def _first_line(path: Path) -> str:
    return _docstring(path).split("\n")[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
