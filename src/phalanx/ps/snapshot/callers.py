"""`ask_all`: ask all participants of a save at once: a request to every one goes out before an answer of any is read.

So a freeze lasts as long as the slowest participant takes, however many there are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from phalanx.errors import PhalanxError
from phalanx.ps.wire.message import RpcReply

_POLL_S = 5.0
_log = logging.getLogger("phalanx.ps")


class Answer(Protocol):
    """A request under way."""

    def result(self) -> RpcReply:
        """Wait for the reply."""
        ...


class Caller(Protocol):
    """A way to ask one participant: a `Connection`, for one."""

    def send(self, op: str, meta: Mapping[str, Any]) -> Answer:
        """Send a request and return without its reply; requests are answered in their order."""
        ...


def ask_all(calls: Sequence[Caller], op: str, meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ask every participant, then read the answers: the time is that of the slowest, not the sum."""
    answers = [call.send(op, meta) for call in calls]
    return [dict(answer.result().meta) for answer in answers]


def resume_all(calls: Sequence[Caller], name: str) -> list[int]:
    """Let changes continue everywhere: on a participant that was not asked to hold them back it does nothing.

    Returns:
        The numbers of those that were not reached.
    """
    answers = {}
    for number, call in enumerate(calls):
        with _warned(name):
            answers[number] = call.send("resume", {"token": name})
    left = set(range(len(calls)))
    for number, answer in answers.items():
        with _warned(name):
            answer.result()
            left.remove(number)
    return sorted(left)


@contextmanager
def _warned(name: str) -> Iterator[None]:
    try:
        yield
    except PhalanxError as e:
        # The error that ended the save is the one to see; a freeze ends by itself.
        _log.warning("a server was not told that snapshot %s let go: %s", name, e)


def collect_results(calls: Sequence[Caller], name: str) -> list[dict[str, Any]]:
    """Wait until every participant has written its part, and return what, by its number."""
    written: dict[int, dict[str, Any]] = {}
    while left := [number for number in range(len(calls)) if number not in written]:
        answers = ask_all([calls[number] for number in left], "saved", {"save": name, "wait_s": _POLL_S})
        written |= {n: dict(answer["result"]) for n, answer in zip(left, answers, strict=True) if answer["done"]}
    return [written[number] for number in range(len(calls))]
