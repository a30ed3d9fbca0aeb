"""Names that the code must not use, and where it does: `python tests/vocabulary.py [PATH...]` lists them."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "phalanx"

VAGUE_WORDS = "found said told made held asked known kept given wanted one here place"
VAGUE = frozenset(VAGUE_WORDS.split())
"""Names of variables that tell how a value came about, not what it is."""

PARTICIPLE_WORDS = """
    added applied arranged asked averaged begun bound built called cast checked chosen closed come counted cut dealt
    decided described done drawn expected filled fitted fixed found gone grown held joined kept known laid left listed
    loaded made marked matched measured merged moved named opened packed parsed picked placed planned put read_back
    reckoned recorded replaced resolved retried run_over said scaled seen sent served shown spread spoken started stated
    struck summed taken timed told traced translated tried turned typed used waited wanted watched weighed weighted
    wrapped written
"""
PARTICIPLES = frozenset(PARTICIPLE_WORDS.split())
"""Participles that name no function of their own: `build_plan`, not `planned`."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax of a file."""
    return ast.parse(path.read_text())


def vague_variables(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every variable and parameter with a vague name; fields may be those of files."""
    tree = tree_of(path)
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    fields = {item.target for node in classes for item in node.body if isinstance(item, ast.AnnAssign)}
    for node in ast.walk(tree):
        if node in fields:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.lineno, node.arg


def participle_functions(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every function that is called by a bare participle."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.lstrip("_") in PARTICIPLES:
            yield node.lineno, node.name


def shared_class_names() -> dict[str, list[str]]:
    """Return every public class name that files of several packages define, with those files."""
    places: dict[str, set[str]] = defaultdict(set)
    for path in files():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(str(path.relative_to(SOURCE)))
    return {name: sorted(paths) for name, paths in places.items() if len({p.split("/")[0] for p in paths}) > 1}


def missing_subjects(path: Path) -> list[str]:
    """Return the names before the colon of a module's first line that its code does not have."""
    text = path.read_text()
    docstring = ast.get_docstring(tree_of(path)) or ""
    subject, colon, _ = docstring.partition("\n")[0].partition(": ")
    code = text.partition(docstring[-20:])[2]
    names = re.findall(r"`(\w+)`", subject) if colon else []
    return [name for name in names if not re.search(rf"\b{name}\b", code)]


def files(*paths: Path) -> list[Path]:
    """Return the Python files below some paths, of the whole package unless others are given."""
    return sorted(file for path in paths or (SOURCE,) for file in ([path] if path.is_file() else path.rglob("*.py")))


def main() -> None:
    """List every offence below the paths of the command line."""
    for path in files(*(Path(argument).resolve() for argument in sys.argv[1:])):
        lines = path.read_text().splitlines()
        for line, name in sorted({*vague_variables(path), *participle_functions(path)}):
            print(f"{path.relative_to(ROOT)}:{line}: {name}: {lines[line - 1].strip()}")
    for name, paths in sorted(shared_class_names().items()):
        print(f"class {name} in {', '.join(paths)}")


if __name__ == "__main__":
    main()
