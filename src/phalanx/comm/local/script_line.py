"""`script_line`: where the script is that called this package."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
)


def script_line() -> str:
    """Return the innermost file and line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, "<")):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
