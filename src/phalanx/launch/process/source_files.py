"""`path_for_user`: tell the script's files from those of libraries, and write paths as users would type them (pure)."""

from __future__ import annotations

import os
import re

_PHALANX = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARY = re.compile(r"(^|/)(site-packages|dist-packages)/|/lib(64)?/python\d(\.\d+)?/|^<(frozen|string|__array)|^$")

STARTER = "launch/process/entry.py"
"""End of the path of the file that runs the script: the frames below it are the same in every rank."""


def is_library(file: str) -> bool:
    """Return whether a file of a stack is of Python, torch, Phalanx or another installed package."""
    return file.startswith(_PHALANX) or _LIBRARY.search(file) is not None


def path_for_user(file: str) -> str:
    """Return a path as a user in the current folder would type it, or as it is where that is no shorter."""
    relative = os.path.relpath(file) if file else file
    return file if relative.startswith("..") else relative
