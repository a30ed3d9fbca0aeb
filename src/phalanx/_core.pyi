"""Native core of Phalanx."""

import numpy
import numpy.typing

def scaled_planes(
    pixels: numpy.typing.NDArray[numpy.uint8],
    scale: numpy.typing.NDArray[numpy.float32],
    shift: numpy.typing.NDArray[numpy.float32],
    planes: numpy.typing.NDArray[numpy.float32],
) -> None:
    """Fills planes (n, channels, pixels) with pixels (n, pixels, channels) * scale + shift, by channel."""

def shuffled(n: int, seed: int, start: int, count: int, step: int = 1) -> numpy.typing.NDArray[numpy.int64]:
    """Elements at start, start + step, ... of the permutation of [0, n) that `seed` picks."""

class SharedOperation:
    """One call of a SharedGroup."""

    @property
    def is_done(self) -> bool: ...
    @property
    def peer(self) -> int: ...

class SharedGroup:
    """Collectives and messages between the ranks of one host; see csrc/shm_group.h."""

    def __init__(self, fd: int, rank: int, size: int, name: str, timeout_s: float) -> None: ...
    def all_reduce(self, data: int, count: int, type: int, reduce: int, /) -> SharedOperation: ...
    def reduce(self, data: int, count: int, type: int, reduce: int, root: int, /) -> SharedOperation: ...
    def reduce_scatter(
        self, inputs: list[int], out: int, counts: list[int], type: int, reduce: int, /
    ) -> SharedOperation: ...
    def all_gather(self, data: int, out: list[int], counts: list[int], type: int, /) -> SharedOperation: ...
    def gather(self, data: int, out: list[int], count: int, type: int, root: int, /) -> SharedOperation: ...
    def scatter(self, inputs: list[int], out: int, count: int, type: int, root: int, /) -> SharedOperation: ...
    def broadcast(self, data: int, count: int, type: int, root: int, /) -> SharedOperation: ...
    def all_to_all(
        self, inputs: list[int], in_counts: list[int], out: list[int], out_counts: list[int], type: int, /
    ) -> SharedOperation: ...
    def barrier(self) -> SharedOperation: ...
    def send(self, memory: int, bytes: int, to: int, tag: int, /) -> SharedOperation: ...
    def receive(self, memory: int, bytes: int, source: int, tag: int, /) -> SharedOperation: ...
    def wait(self, operation: SharedOperation, timeout_s: float = 0.0) -> None: ...
    def ends_within(self, operation: SharedOperation, patience_s: float) -> bool: ...
    def missing_from(self, operation: SharedOperation, /) -> str: ...
    def missing_ranks(self, operation: SharedOperation, /) -> list[int]: ...
    def waited_for(self) -> str: ...
    def under_way(self) -> tuple[int, int, list[tuple[str, str, str, int, float, list[int]]]]: ...
    def wait_times(self) -> tuple[float, list[float], list[float]]: ...
    def disagree(self, text: str) -> None: ...
    def progress(self, operation: SharedOperation, /) -> None: ...
    def close(self) -> None: ...
    def set_timeout(self, timeout_s: float, /) -> None: ...
    @staticmethod
    def label_calls(label: str) -> None: ...
    @staticmethod
    def bytes_for(size: int, /) -> int: ...

class SlotParser:
    """Parses lines of click logs into arrays."""

    def __init__(
        self,
        has_label: bool,
        dense: list[str],
        sparse: list[str],
        salts: list[str],
        hash_space: int,
        is_columns: bool,
    ) -> None: ...
    def parse(
        self, text: bytes
    ) -> tuple[
        int,
        numpy.typing.NDArray[numpy.float32],
        numpy.typing.NDArray[numpy.float32],
        numpy.typing.NDArray[numpy.int64],
        numpy.typing.NDArray[numpy.int64],
        int,
        tuple[int, int, int, bytes] | None,
    ]:
        """Rows, label, dense, ids and offsets of whole lines; how many were broken and what the first is."""

def hash_texts(salt: str, texts: list[str | bytes], hash_space: int = 0) -> numpy.typing.NDArray[numpy.int64]:
    """Ids of texts hashed with a salt."""

class EmbeddingTable:
    """A table of rows by 64-bit id; see phalanx.ps.table.table.RowTable."""

    def __init__(self, spec: object, layout: object, salt: int) -> None: ...
    def pull(self, keys: numpy.typing.NDArray[numpy.int64], out: numpy.typing.NDArray[numpy.float32]) -> None: ...
    def push(
        self,
        keys: numpy.typing.NDArray[numpy.int64],
        gradients: numpy.typing.NDArray[numpy.float32],
        lr: float | None = None,
        counts: numpy.typing.NDArray[numpy.uint32] | None = None,
        shows: numpy.typing.NDArray[numpy.float32] | None = None,
        clicks: numpy.typing.NDArray[numpy.float32] | None = None,
    ) -> int: ...
    def add(self, keys: numpy.typing.NDArray[numpy.int64], deltas: numpy.typing.NDArray[numpy.float32]) -> None: ...
    def assign(self, keys: numpy.typing.NDArray[numpy.int64], values: numpy.typing.NDArray[numpy.float32]) -> None: ...
    def shrink(self) -> int: ...
    def clear(self) -> None: ...
    def read_shard(
        self, shard: int, since: int
    ) -> tuple[
        numpy.typing.NDArray[numpy.int64],
        numpy.typing.NDArray[numpy.uint64],
        numpy.typing.NDArray[numpy.float32],
        numpy.typing.NDArray[numpy.int64],
        numpy.typing.NDArray[numpy.uint64],
        numpy.typing.NDArray[numpy.uint32],
        numpy.typing.NDArray[numpy.uint64],
        numpy.typing.NDArray[numpy.int64],
        int,
        int,
        bool,
    ]: ...
    def restore_shard(
        self,
        shard: int,
        keys: numpy.typing.NDArray[numpy.int64],
        ticks: numpy.typing.NDArray[numpy.uint64],
        rows: numpy.typing.NDArray[numpy.float32],
        waiting_keys: numpy.typing.NDArray[numpy.int64],
        waiting_ticks: numpy.typing.NDArray[numpy.uint64],
        waiting_counts: numpy.typing.NDArray[numpy.uint32],
        days: numpy.typing.NDArray[numpy.uint64],
        removed: numpy.typing.NDArray[numpy.int64],
        decays: int,
        tick: int,
        is_complete: bool,
    ) -> None: ...
    def keys(self, shard: int) -> numpy.typing.NDArray[numpy.int64]: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def moved(self) -> int:
        """Entries that growing indexes have moved so far."""

    @property
    def pushed(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def tick(self) -> int: ...

def unique(
    arrays: list[numpy.typing.NDArray[numpy.int64]], places: numpy.typing.NDArray[numpy.int64]
) -> tuple[numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.uint32]]:
    """The distinct ids and their counts; fills `places` with the place of each id."""

def add_weighted(
    places: numpy.typing.NDArray[numpy.int64],
    rows: numpy.typing.NDArray[numpy.float32],
    weight: float,
    sums: numpy.typing.NDArray[numpy.float32],
) -> None:
    """Adds weight * rows to the rows of sums at places."""

def split_by_owner(
    keys: numpy.typing.NDArray[numpy.int64],
    salt: int,
    servers: int,
    order: numpy.typing.NDArray[numpy.int64],
    offsets: numpy.typing.NDArray[numpy.int64],
) -> None:
    """Positions sorted by the server that owns their id, and where each server's part begins."""

def largest_magnitudes(
    data: list[int],
    counts: list[int],
    types: list[int],
    threads: int,
    largest: numpy.typing.NDArray[numpy.float64],
) -> None:
    """Fills `largest` with that of each array."""

def square_sums(
    data: list[int],
    counts: list[int],
    types: list[int],
    threads: int,
    first_shifts: numpy.typing.NDArray[numpy.float64],
    second_shifts: numpy.typing.NDArray[numpy.float64],
    first: numpy.typing.NDArray[numpy.float64],
    second: numpy.typing.NDArray[numpy.float64],
) -> None:
    """Fills `first` and `second` with the sums of squares of each array."""
