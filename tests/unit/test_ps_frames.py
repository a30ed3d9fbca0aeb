"""The bytes of a message: what goes in comes out, and what is no frame is refused."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from phalanx.errors import ConfigError, PeerLostError
from phalanx.ps.wire import frame
from phalanx.ps.wire.channel import Channel
from phalanx.ps.wire.frame import FrameError, FrameKind
from phalanx.ps.wire.message import ControlRequest, Pending
from phalanx.ps.wire.segments import ReplyBuffer

SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)
ARRAYS = st.lists(
    st.sampled_from(list(frame.DTYPES)).flatmap(lambda dtype: arrays_of.arrays(dtype, SHAPES)), max_size=5
)
U64 = st.integers(0, 2**64 - 1)


def joined(layout: frame.PayloadLayout, arrays: list[frame.Array]) -> frame.Bytes:
    """Put the chunks of a payload together as a receiver does, each checked."""
    wire = b"".join(frame.chunks(layout, arrays))
    out, at = [], 0
    for start in range(0, layout.payload_bytes, frame.CHUNK_BYTES):
        size = min(frame.CHUNK_BYTES, layout.payload_bytes - start)
        chunk = np.frombuffer(wire, np.uint8, size, at)
        assert frame.checksum_holds(chunk, wire[at + size : at + size + 4])
        out.append(chunk)
        at += size + 4
    assert at == len(wire)
    return np.concatenate([np.zeros(0, np.uint8), *out])


@given(ARRAYS)
def test_arrays_come_out_of_a_payload_as_they_went_in(arrays):
    layout = frame.layout_of(arrays)
    described = frame.layout_from([[name, list(shape)] for name, shape in layout.describe()], layout.payload_bytes)
    assert described == layout
    for got, sent in zip(described.read(joined(layout, arrays)), arrays, strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert np.array_equal(got, sent, equal_nan=sent.dtype.kind == "f")


@given(ARRAYS)
def test_shared_memory_holds_the_same_bytes_as_a_socket(arrays):
    layout = frame.layout_of(arrays)
    memory = np.zeros(layout.payload_bytes, np.uint8)
    layout.write(arrays, memory)
    assert np.array_equal(memory, joined(layout, arrays))


def test_a_payload_is_cut_into_checked_chunks_across_arrays(monkeypatch):
    monkeypatch.setattr(frame, "CHUNK_BYTES", 100)
    arrays = [np.arange(7), np.arange(90, dtype=np.uint8), np.arange(33, dtype=np.float32)]
    layout = frame.layout_of(arrays)
    assert [place[2] for place in layout.places] == [0, 64, 192]
    for got, sent in zip(layout.read(joined(layout, arrays)), arrays, strict=True):
        assert np.array_equal(got, sent)


@given(st.sampled_from(FrameKind), U64, U64, st.integers(0, frame.LARGEST_PAYLOAD))
def test_a_header_comes_out_as_it_went_in(kind, client, seq, payload_bytes):
    raw = frame.encode(kind, frame.SHARED, client, seq, {"op": "é"}, payload_bytes)
    head, rest = raw[: frame.HEADER_BYTES], raw[frame.HEADER_BYTES :]
    assert frame.HEADER_BYTES == 40
    assert frame.decode_header(head) == (kind, frame.SHARED, client, seq, len(rest), payload_bytes)
    frame.check_object(head, rest)
    assert frame.parse_object(rest) == {"op": "é"}


WHOLE = frame.encode(FrameKind.REQUEST, 0, 1, 2, {"op": "pull", "x": 1}, 0)


@given(st.integers(0, 8 * len(WHOLE) - 1))
def test_any_flipped_bit_of_header_or_object_is_found(bit):
    raw = bytearray(WHOLE)
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        read_all(raw)


def read_all(raw: bytes | bytearray) -> None:
    header = frame.decode_header(raw[:40])
    if header.object_bytes != len(raw) - 40:
        raise FrameError("other length")
    frame.check_object(raw[:40], raw[40:])


@pytest.mark.parametrize(
    "described",
    [
        None,
        {},
        ["int64"],
        [["int64"]],
        [["int64", 3]],
        [["complex128", [3]]],
        [["object", [3]]],
        [[7, [3]]],
        [["int64", [-1]]],
        [["int64", [True]]],
        [["int64", [1.0]]],
        [["int64", ["3"]]],
        [["int64", [1] * 9]],
        [["int64", [2**39, 2**39]]],
        [["int64", [2**62]]],
        [["int64", [0, 2**39, 2**39]]],
        [["uint8", [0]]] * (frame.MOST_ARRAYS + 1),
    ],
)
def test_arrays_described_wrongly_are_refused(described):
    with pytest.raises(FrameError, match="array"):
        frame.layout_from(described, 0)


@pytest.mark.parametrize("raw", [b"[1]", b"{", b"\xff", b"[" * 100_000, b"1" * 5000, b"null"])
def test_an_object_must_be_a_json_object(raw):
    with pytest.raises(FrameError, match=r"not (a )?JSON"):
        frame.parse_object(raw)


def test_a_type_that_does_not_travel_is_named_with_those_that_do():
    with pytest.raises(ConfigError, match=r"array of >i8 cannot .* int64, float32, uint32, uint8, float64\."):
        frame.layout_of([np.zeros(1, ">i8")])


def test_an_object_too_large_to_travel_is_refused(monkeypatch):
    monkeypatch.setattr(frame, "LARGEST_OBJECT", 100)
    with pytest.raises(ConfigError, match=r"an object of \d+ bytes cannot be sent; send at most 100\."):
        frame.encode(FrameKind.REPLY, 0, 0, 0, {"long": "x" * 100}, 0)


def test_a_shared_reply_to_a_request_that_was_given_up_has_no_memory():
    pending = Pending(ControlRequest("report", {}, [], 64), lambda pending: pytest.fail("nobody waits"))
    pending.settle(PeerLostError("it did not answer in time"))
    header = frame.Header(FrameKind.REPLY, frame.SHARED, 0, 1, 0, 8)
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with ours, theirs, pytest.raises(FrameError, match="memory it does not have"):
        pending.read_outcome(channel, header, b'{"arrays": [["int64", [1]]], "at": 0}', "server 0", None)


def test_a_reply_buffer_gives_memory_in_the_order_of_a_payload_until_it_is_full():
    memory = np.zeros(256, np.uint8)
    buffer = ReplyBuffer(memory)
    first, second = buffer.empty(3, np.int64), buffer.empty((2, 4), np.float32)
    assert (first.shape, second.shape, second.dtype) == ((3,), (2, 4), np.float32)
    layout = frame.layout_of([first, second])
    assert [place.ctypes.data for place in layout.read(memory)] == [first.ctypes.data, second.ctypes.data]
    assert not np.shares_memory(buffer.empty(100, np.float64), memory)
    assert not np.shares_memory(ReplyBuffer(None).empty(1, np.uint8), memory)
