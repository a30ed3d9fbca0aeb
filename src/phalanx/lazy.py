"""`lazy_names`: a package `__getattr__` that imports public names at first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.errors import did_you_mean


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    Args:
        package: Its `__name__`.
        homes: Every public name, and the module of the package that has it.
    """

    def getattribute(name: str) -> Any:
        if name not in homes:
            # With a name of its own Python does not add a guess to ours.
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{did_you_mean(name, homes)}", name=name)
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattribute, lambda: sorted(homes)
