"""Which steps are due, where something is done every so many."""

from __future__ import annotations

from phalanx.errors import ConfigError


class Pace:
    """Every n-th step is due; where steps come in sinks, the end of a sink that holds one.

    Args:
        every: Steps from one to the next; never due when None.
        name: What the caller calls `every`, for messages.
    """

    def __init__(self, every: int | None, name: str) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigError(f"{name} is a number of steps, found {every!r}. Give at least 1.")
        self._every = every
        self._done = 0

    def restart(self, step: int) -> None:
        """Go on after this step."""
        self._done = step

    def is_due(self, step: int) -> bool:
        """Return whether an n-th step was among those since the last call."""
        before, self._done = self._done, step
        return self._every is not None and step // self._every > before // self._every
