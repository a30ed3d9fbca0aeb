"""Private names of torch that a package uses, found in its syntax: `python tests/torch_internals.py` lists them."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

from vocabulary import SOURCE, tree_of

_IN_TEXT = re.compile(r"torch(?:\.\w+)*\.(?:_\w+|distributed_c10d)(?:\.\w+)*")
"""A name in a string, as modules that are looked up in `sys.modules`."""


@functools.cache
def private_names(source: Path = SOURCE) -> dict[str, set[str]]:
    """Return the private names that files use, each with those files.

    A full name (`torch._C._current_graph_task_id`) is one that begins at torch. A name that begins with a point
    (`._cdata`) is a private attribute of an object that nothing in the files defines, so that is somebody else's.
    """
    paths = [path for path in sorted(source.rglob("*.py")) if path.name != "torch_names.py"]  # the list itself
    trees = {path: tree_of(path) for path in paths}
    own = set().union(*map(_defined, trees.values()))
    names: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        if _speaks_of_torch(tree):
            for name in _uses(tree, own):
                names[name].add(str(path.relative_to(source)))
    return names


def _speaks_of_torch(tree: ast.Module) -> bool:
    return any("torch" in module for module in _imported_modules(tree)) or any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and _IN_TEXT.fullmatch(node.value)
        for node in ast.walk(tree)
    )


def _imported_modules(tree: ast.Module) -> set[str]:
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return modules


def _defined(tree: ast.Module) -> set[str]:
    """Return the private names that a file defines: functions, classes, variables, fields and attributes it sets."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "own" | "result"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                names.add(name)
    return {name for name in names if _is_private(name)}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Return what names of a file stand for, of those that begin at torch."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return aliases


def _full_name(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute):
        before = _full_name(node.value, aliases)
        return f"{before}.{node.attr}" if before else ""
    return ""


def _uses(tree: ast.Module, own: set[str]) -> set[str]:
    aliases, names = _aliases(tree), set()
    full = [name for name in aliases.values() if _has_private_part(name)]
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):  # the outermost attribute of a chain comes first
        if isinstance(node, ast.Attribute):
            name = _full_name(node, aliases)
            if name and node not in inner and _has_private_part(name):
                full.append(name)
            if name:
                inner.add(node.value)
            elif _is_private(node.attr) and node.attr not in own:
                names.add(f".{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _IN_TEXT.fullmatch(node.value):
            full.append(node.value)
    return names | set(full)


def _has_private_part(name: str) -> bool:
    return any(_is_private(part) or part == "distributed_c10d" for part in name.split("."))


if __name__ == "__main__":
    for name, paths in sorted(private_names().items()):
        print(name, *sorted(paths))
