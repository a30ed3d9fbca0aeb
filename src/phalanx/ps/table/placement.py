"""`shard_of`, `owner_of`: hash ids to 1024 virtual shards, and virtual shards to servers.

The hash is `data.mix.mix64`, a bijection, so no two ids of a table ever meet. None of this may change: snapshots are
cut by it.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

from phalanx.data.sampling.hash64 import Words, mix64
from phalanx.errors import ConfigError

SHARDS = 1024
"""Virtual shards of every table, fixed for ever."""

_SHARD_BITS = 10


@functools.lru_cache(maxsize=4096)
def table_salt(name: str) -> int:
    """Return the number, 0 to 2**64 - 1, that makes a table's hashes its own; it depends on the name alone."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def mixed(keys: NDArray[np.int64], salt: int) -> Words:
    """Return the hash of each id; the shard is its top 10 bits. Shape (n,) in and out."""
    return mix64(keys.view(np.uint64) ^ np.uint64(salt))


def shard_of(keys: NDArray[np.int64], salt: int) -> NDArray[np.int64]:
    """Return the virtual shard, 0 to 1023, of each id. Shape (n,) in and out."""
    return (mixed(keys, salt) >> np.uint64(64 - _SHARD_BITS)).astype(np.int64)


def owner_of(shards: NDArray[np.int64], servers: int) -> NDArray[np.int64]:
    """Return the server, 0 to `servers` - 1, that owns each shard: contiguous ranges that differ by at most one shard.

    Raises:
        ConfigError: If there are fewer than 1 or more than 1024 servers.
    """
    check_servers(servers)
    return shards * servers // SHARDS


def shards_owned(server: int, servers: int) -> range:
    """Return the shards of one server, as `owner_of` assigns them.

    Raises:
        ConfigError: If there are fewer than 1 or more than 1024 servers.
    """
    check_servers(servers)
    return range(-(-server * SHARDS // servers), -(-(server + 1) * SHARDS // servers))


def check_servers(servers: int) -> None:
    """Check that every server can own a shard.

    Raises:
        ConfigError: If there are fewer than 1 or more than 1024 servers.
    """
    if not 1 <= servers <= SHARDS:
        raise ConfigError(f"Asked for {servers} servers; a table has {SHARDS} shards. Start 1 to {SHARDS} servers.")
