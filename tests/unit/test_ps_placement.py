from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.sampling.hash64 import mix64, mix_one
from phalanx.errors import ConfigError
from phalanx.ps.stores.dedup import split_by_owner
from phalanx.ps.stores.partition import partition_keys
from phalanx.ps.table.placement import SHARDS, owner_of, shard_of, shards_owned, table_salt

ids = st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, -1, 2**63 - 1, -(2**63)])), max_size=50)


def keys_of(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


def test_placement_is_the_one_earlier_releases_had() -> None:
    assert table_salt("user") == 0x638DD47B9A5CDFAF
    assert shard_of(keys_of([0, -1, 2**63 - 1, -(2**63), 7]), table_salt("user")).tolist() == [701, 226, 953, 490, 645]
    words = [0, 1, 2**64 - 1]
    mixed = [0, 6238072747940578789, 13029008266876403067]
    assert mix64(np.array(words, np.uint64)).tolist() == [mix_one(word) for word in words] == mixed


def test_strided_ids_spread_evenly_over_shards() -> None:
    counts = np.bincount(
        shard_of(np.arange(0, 1000 * 102_400, 1000, dtype=np.int64), table_salt("t")), minlength=SHARDS
    )
    assert counts.min() > 50
    assert counts.max() < 150


def test_tables_place_ids_differently() -> None:
    keys = np.arange(1000, dtype=np.int64)
    assert (shard_of(keys, table_salt("a")) == shard_of(keys, table_salt("b"))).mean() < 0.01


@given(servers=st.integers(1, SHARDS))
def test_each_shard_has_one_owner_and_owners_differ_by_one_shard(servers: int) -> None:
    owners = owner_of(np.arange(SHARDS), servers)
    assert [list(shards_owned(s, servers)) for s in range(servers)] == [
        np.flatnonzero(owners == s).tolist() for s in range(servers)
    ]
    counts = np.bincount(owners, minlength=servers)
    assert counts.max() - counts.min() <= 1


@given(values=ids, servers=st.integers(1, SHARDS), salt=st.integers(0, 2**64 - 1))
def test_ids_are_split_by_their_owner_in_their_order(values: list[int], servers: int, salt: int) -> None:
    keys = keys_of(values)
    order, offsets = split_by_owner(keys, salt, servers)
    owners = owner_of(shard_of(keys, salt), servers)
    for server in range(servers if servers < 20 else 0):
        assert order[offsets[server] : offsets[server + 1]].tolist() == np.flatnonzero(owners == server).tolist()
    assert order.dtype == offsets.dtype == np.int64
    assert (offsets[0], offsets[-1], len(offsets)) == (0, len(keys), servers + 1)


@pytest.mark.parametrize("servers", [0, -1, 1025])
def test_a_number_of_servers_that_cannot_be_is_an_error(servers: int) -> None:
    with pytest.raises(ConfigError, match=rf"{servers} servers.*1024 shards.*Start 1 to 1024"):
        partition_keys(keys_of([1]), 0, servers)
