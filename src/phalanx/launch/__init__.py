"""The launcher (`phalanx run`): start, monitor and stop the processes of a job.

Nothing here imports torch except what runs inside the fork server and its children (`preload`, `entry`,
`store`, `node_link`), and `from_function`. The package can be called: `px.launch(fn, n)` starts a function on n ranks.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Launch(ModuleType):
    """This package, which is the name of a folder and of a function at once."""

    def __call__(self, fn: Any, n: int, *args: Any) -> Any:
        """See `phalanx.launch.from_function.launch`."""
        from phalanx.launch.from_function import launch

        return launch(fn, n, *args)


sys.modules[__name__].__class__ = _Launch
