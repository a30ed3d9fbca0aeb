"""The part of a request that goes to each server: native core and NumPy write the same bytes, merge the same rows."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.ps.stores.partition import partition_keys, partitioned_request
from phalanx.ps.stores.partition_numpy import NumpyPartition, NumpyRequest
from phalanx.ps.stores.update import TableUpdate
from phalanx.versions import HAS_NATIVE

KEYS = [np.arange(n, dtype=np.int64) * 7919 - 5 for n in (40, 0, 1)]


def updates() -> list[TableUpdate]:
    """Return one update with each kind and set of columns."""
    first, none, single = KEYS
    counts = np.arange(40, dtype=np.uint32)
    values = (np.arange(120, dtype=np.float32) / 3).reshape(40, 3)
    values[0], values[1] = (np.nan, -np.nan, np.inf), (3.4e38, -1e-40, -0.0)
    return [
        TableUpdate("a", first, values, lr=0.25, counts=counts),
        TableUpdate("b", none, np.empty((0, 4), np.float32), kind="delta"),
        TableUpdate(
            "c", single, np.ones((1, 1), np.float32), shows=np.ones(1, np.float32), clicks=np.ones(1, np.float32)
        ),
    ]


def requests(servers, make_request, make_partition, is_narrow=False):
    request = make_request(servers)
    named = np.arange(servers, dtype=np.uint64)  # the first server knows no pull
    for salt, (update, pulls) in enumerate(zip(updates(), (named, None, None), strict=True)):
        request.add_push(update, make_partition(update.keys, salt, servers), pulls, is_narrow=is_narrow)
    for salt, (keys, dim) in enumerate(zip(KEYS, (5, 2, 1), strict=True)):
        request.add_pull(make_partition(keys, salt, servers), dim, is_narrow=is_narrow and salt != 1)
    return request


@pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not installed")
@pytest.mark.parametrize("servers", [1, 2, 16])
@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_both_write_the_same_bytes_for_every_server_and_merge_the_same_rows(servers, with_keys, is_narrow):
    native = requests(servers, partitioned_request, partition_keys, is_narrow)
    twin = requests(servers, NumpyRequest, NumpyPartition.of, is_narrow)
    assert type(native) is not type(twin)
    payloads = {}
    for server in range(servers):
        assert native.counts(server) == twin.counts(server)
        assert native.heads(server, with_keys) == twin.heads(server, with_keys)
        size = native.payload_bytes(server, with_keys)
        assert size == twin.payload_bytes(server, with_keys)
        written = np.full((2, size), 7, np.uint8)
        native.write(server, with_keys, written[0])
        twin.write(server, with_keys, written[1])
        assert written[0].tobytes() == written[1].tobytes()
        assert native.rows_bytes(server) == twin.rows_bytes(server)
        if native.counts(server)[1]:
            payloads[server] = np.random.default_rng(server).integers(0, 100, native.rows_bytes(server), np.uint8)
    for ours, theirs in zip(native.merge(payloads), twin.merge(payloads), strict=True):
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not installed")
def test_rows_of_several_servers_lie_in_one_piece_of_memory():
    request = requests(2, partitioned_request, partition_keys)
    merged = request.merge({server: np.zeros(request.rows_bytes(server), np.uint8) for server in range(2)})
    rows = [array for array in merged if array.size]
    assert len(rows) > 1
    ends = [array.ctypes.data + array.nbytes for array in rows]
    assert [array.ctypes.data for array in rows[1:]] == ends[:-1]


@pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not installed")
def test_memory_of_another_length_is_refused():
    request = requests(2, partitioned_request, partition_keys)
    with pytest.raises(ValueError, match="another length than the payload"):
        request.write(0, True, np.empty(request.payload_bytes(0, True) - 1, np.uint8))
    with pytest.raises(ValueError, match="another length than the payload"):
        request.merge({0: np.empty(3, np.uint8)})


def test_a_request_keeps_the_arrays_it_was_made_of():
    keys = np.arange(1000, dtype=np.int64)
    request = partitioned_request(2)
    request.add_pull(partition_keys(keys.copy(), 3, 2), 1)
    again = partitioned_request(2)
    again.add_pull(partition_keys(keys, 3, 2), 1)
    for server in range(2):
        written = np.empty((2, request.payload_bytes(server, True)), np.uint8)
        request.write(server, True, written[0])
        again.write(server, True, written[1])
        assert written[0].tobytes() == written[1].tobytes()
