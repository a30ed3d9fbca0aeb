"""`UnusedParameters`: name the parameters that no rank used in the first step."""

from __future__ import annotations

import logging
from collections.abc import Collection

logger = logging.getLogger("phalanx.parallel")


class UnusedParameters:
    """The parameters of one model that no rank has used yet, until its first step is over."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        """Those that no rank used in the first step, as far as it has come."""

        self.is_looking = True
        """Whether the first step is not over."""

        self._touched: set[str] = set()

    def look(self, unused: Collection[str], touched: set[str]) -> None:
        """Note a reduction; name what was not used once a parameter comes round again and shows that the step is over.

        Not at the first round: a re-entrant checkpoint has one of its own before the rest of the backward pass.

        Args:
            unused: Parameters that no rank used in it.
            touched: Those that this rank used.
        """
        if self._touched.isdisjoint(touched):
            self.names = tuple(name for name in unused if name in self.names or not self._touched)
            self._touched |= touched
            return
        self.is_looking = False
        if self.names:
            names = ", ".join(self.names[:8]) + (f" and {len(self.names) - 8} more" if len(self.names) > 8 else "")
            logger.warning("no rank used these parameters in the first step; they keep grad=None: %s", names)
