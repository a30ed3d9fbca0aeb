"""`StoreWatch`: see that the store of the hosts does not answer.

A call to a store whose host is cut off ends after a quarter of an hour, with TCP's own patience.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StoreWatch:
    """A thread that looks whether the store has answered since its last look.

    Looks are counted, not seconds: for a process that was stopped for a while the store is not to blame.

    Args:
        on_silence: Called once, in the thread.
        silence_s: After so long without an answer.
        look_s: Time between two looks.
    """

    def __init__(self, on_silence: Callable[[], None], *, silence_s: float, look_s: float) -> None:
        self._on_silence = on_silence
        self._most_looks, self._look_s = silence_s / look_s, look_s
        self._has_answered = True

    def start(self) -> None:
        """Look from now on, as long as this process runs."""
        threading.Thread(target=self._look, name="store watch", daemon=True).start()

    def note_answer(self) -> None:
        """Note that the store has answered all that it was asked."""
        self._has_answered = True

    def _look(self) -> None:
        looks = 0
        while looks < self._most_looks:
            time.sleep(self._look_s)
            looks = 0 if self._has_answered else looks + 1
            self._has_answered = False
        self._on_silence()
