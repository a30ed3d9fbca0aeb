"""`post_all`: a pull or push to many servers at once: one native call writes all frames, one takes all replies.

What is out of the ordinary is left to each `Connection`: TLS, a socket that is full, a server that waits or refuses, a
connection that broke.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from phalanx.errors import PhalanxError
from phalanx.ps.stores.partition import ServerPart
from phalanx.ps.wire.client.connection import Connection, ReplyTurn, StartedRequest
from phalanx.ps.wire.data_frame import DataReply, DataRequest, DataStatus
from phalanx.ps.wire.frame import Bytes, FrameError
from phalanx.ps.wire.message import Pending
from phalanx.versions import HAS_NATIVE

if HAS_NATIVE:
    from phalanx import _core

_LONGEST_WAIT_S = 5.0
_HOLD_S = 0.002
"""How long replies that came wait for those of other servers: nobody else reads their links meanwhile."""

_ARRIVED, _FOR_PYTHON = 1, 2  # DueReply::State in csrc/wire_client.h
_STATUSES = tuple(DataStatus)
_NO_ROWS: Bytes = np.empty(0, np.uint8)

_Arrived = tuple[int, int, int, int, int, int, int, int, int]
"""State, first and last byte that were read and not taken, errno; and of a reply status, number, dropped, whether its
rows are in shared memory, and where they begin."""


def post_all(parts: Sequence[tuple[Connection, DataRequest]]) -> list[Pending]:
    """Send the parts of one pull or push, at most one to each server, as `Connection.post` sends one.

    What cannot be sent has its error as its answer: the other parts are on their way.
    """
    if not HAS_NATIVE:
        return [_post(connection, request) for connection, request in parts]
    started: list[StartedRequest | None] = []
    sent: list[tuple[int, bytes, bool]] = []
    try:
        for connection, request in parts:
            started.append(connection.begin(request))
        sent = _send([(s, request) for s, (_, request) in zip(started, parts, strict=True) if s is not None])
    finally:
        _finish([s for s in started if s is not None], sent)
    return [
        _post(connection, request) if of_server is None else of_server.pending
        for of_server, (connection, request) in zip(started, parts, strict=True)
    ]


def collect(posted: Sequence[tuple[Connection, Pending]]) -> None:
    """Read the replies of several servers at once; `Pending.result` then has them, and waits for those that are late.

    Args:
        posted: At most one request of each connection.
    """
    while HAS_NATIVE and (turns := _receive(posted)):
        posted = [(connection, pending) for connection, pending in posted if pending.outcome is None]
        now = time.monotonic()
        if any(turn.pending.outcome is None and now >= turn.pending.deadline for turn in turns):
            return


def _post(connection: Connection, request: DataRequest) -> Pending:
    try:
        return connection.post(request)
    except PhalanxError as error:
        return connection.fail(request, error)


def _send(frames: Sequence[tuple[StartedRequest, DataRequest]]) -> list[tuple[int, bytes, bool]]:
    if not frames:
        return []
    _, first = frames[0]
    fields = [_frame_fields(started, request.part) for started, request in frames]
    return _core.send_frames(_part(first).request, first.kind, first.step, first.weight, first.keep, fields)


def _part(request: DataRequest) -> ServerPart:
    assert isinstance(request.part, ServerPart)
    return request.part


def _frame_fields(started: StartedRequest, part: Any) -> tuple[Any, ...]:
    connection, pending, link, lease, memory = started
    number, descriptor = (0, None) if lease is None else (lease.segment.number, lease.segment.descriptor)
    to = part.server, part.with_keys, link.channel.fileno(), connection.client, pending.seq
    return *to, number, memory, -1 if descriptor is None else descriptor


def _finish(started: Sequence[StartedRequest], sent: Sequence[tuple[int, bytes, bool]]) -> None:
    """End the writing of every request, those that need no waiting first; one that was broken off costs its link."""
    left = deque(sorted(zip_longest(started, sent), key=_needs_waiting))
    try:
        while left and left[0][1] is not None:
            request, (error, rest, has_begun) = left.popleft()
            request.connection.finish(request, None if error else rest, has_begun=has_begun)
    finally:
        for request, _ in left:
            request.pending.forget_memory()
            request.connection.finish(request, None, has_begun=True)


def _needs_waiting(frame: tuple[StartedRequest, tuple[int, bytes, bool] | None]) -> tuple[bool, int]:
    _, sent = frame
    return sent is None, 0 if sent is None else len(sent[1])


def _receive(posted: Sequence[tuple[Connection, Pending]]) -> list[ReplyTurn]:
    """Take replies until all are here, or a frame is for Python, which then reads it. Returns whose turn it was."""
    turns: list[ReplyTurn] = []
    arrived: list[_Arrived] = []
    try:
        for connection, pending in posted:
            if (turn := connection.take_turn(pending)) is not None:
                turns.append(turn)
        if turns:
            patience_s = min(turn.pending.deadline for turn in turns) - time.monotonic()
            due = [_due_fields(turn) for turn in turns]
            _core.receive_replies(due, max(0.0, min(patience_s, _LONGEST_WAIT_S)), _HOLD_S, arrived)
    finally:
        _end_turns(turns, arrived)
    return turns


def _due_fields(turn: ReplyTurn) -> tuple[Any, ...]:
    pending, link = turn
    return link.channel.fileno(), *link.channel.read_ahead(), pending.seq, pending.reply_bytes


def _end_turns(turns: Sequence[ReplyTurn], arrived: Sequence[_Arrived]) -> None:
    """End every turn with what came of it; one that was broken off after bytes came costs its link."""
    left = deque(turns)
    unread: ReplyTurn | None = None
    try:
        for state, start, end, error, *reply in arrived:
            turn = left[0]
            turn.link.channel.set_read_ahead(start, end)
            if state == _FOR_PYTHON and not error and unread is None:
                unread = left.popleft()
                continue
            why = _settle(turn, *reply) if state == _ARRIVED else os.strerror(error) if error else None
            turn.link.end_turn(why)
            left.popleft()
        if unread is not None:
            # When nobody waits for another link any more. A second frame of that kind comes next.
            turn, unread = unread, None
            turn.link.read(turn.pending.deadline)
    finally:
        for turn in (*left, *([unread] if unread else ())):
            turn.link.end_turn("reading its answer was interrupted" if arrived else None)


def _settle(turn: ReplyTurn, status: int, number: int, dropped: int, is_shared: int, rows_at: int) -> str | None:
    """Give a request its reply; returns why the link can be read no more, if it cannot."""
    pending, link = turn
    count = pending.reply_bytes if status <= DataStatus.AGAIN else 0
    rows = _NO_ROWS
    try:
        if count and is_shared:
            rows = pending.reply_memory(rows_at, count)
        elif count:
            rows = link.channel.read_ahead()[0][rows_at : rows_at + count].copy()
    except FrameError as error:
        return str(error)
    link.settle(pending, DataReply(_STATUSES[status], number, dropped, rows))
    return None
