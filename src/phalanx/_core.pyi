"""Native core of Phalanx."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import numpy.typing

from phalanx.errors import PhalanxError

_Counts = tuple[str | None, int, int, list[int], list[bool]]
_Array = numpy.typing.NDArray[Any]
_Update = tuple[int, int, _Array, _Array, float | None, _Array | None, _Array | None, _Array | None]

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

class ServerClocks:
    """Pushes of each worker; see phalanx.ps.server.clocks.Clocks."""

    def __init__(self, counts: _Counts, report_s: float) -> None: ...
    def counts(self) -> _Counts:
        """Mode, bound, steps of mode sync that are in the tables, pushes and whether it is live of each worker."""

    def _set_mode(self, mode: str, bound: int) -> None: ...
    def push(self, worker: int) -> None:
        """Count one more push of a worker."""

    def apply(self, version: int) -> None:
        """Say that this many steps of mode `sync` are in the tables."""

    def join(self, worker: int) -> None:
        """Count a worker that had left among the live again; in mode `sync` it continues with the current step."""

    def leave(self, worker: int) -> None:
        """Take a worker out of every wait: it pushes no more."""

    def connect(self, worker: int) -> None:
        """Note that a worker's connection is there, or back."""

    def disconnect(self, worker: int, now: float) -> None:
        """Note that a live worker's connection closed, at `now` seconds."""

    def expire(self, now: float, grace_s: float) -> list[int]:
        """Return the workers that went `grace_s` seconds ago without leaving; every wait, now and later, then fails."""

    def lose_missing(self, waited_s: float, now: float) -> None:
        """Count the `missing` workers as lost, after so many seconds; every wait, now and later, then fails."""

    def stop(self) -> None:
        """End every wait, now and later, because the server stops."""

    def next_step(self, worker: int) -> int:
        """Return the number of the push that a worker makes next."""

    @property
    def complete(self) -> int:
        """Steps that every live worker has pushed; with no live worker, those that any worker has pushed."""

    @property
    def missing(self) -> list[int]:
        """Live workers that never connected since this server started."""

    def _disconnected(self) -> list[int]: ...
    def check(self) -> None:
        """Continue only while no worker is lost and the server runs; raises PeerLostError or ClosedError."""

    def _wait(self, step: int, report: Callable[[str, bool], None]) -> None: ...
    def _wait_steps(self, steps: list[int], seconds: float) -> list[int]: ...

class WriteGate:
    """Who may change a server now; see phalanx.ps.server.write_freeze.WriteFreeze."""

    def __init__(self, clock: Callable[[], float], expired: Callable[[str], None], report_s: float) -> None: ...
    def enter(self, worker: int, step: int) -> None: ...
    def leave(self) -> None: ...
    def enter_alone(self, worker: int, step: int, report: Callable[[str, bool], None]) -> None: ...
    def enter_frozen(self, token: str) -> None: ...
    def leave_alone(self) -> None: ...
    def freeze(self, token: str, seconds: float, steps: Sequence[int] = (), holder: str = ...) -> None:
        """Hold changes back for at most so many seconds, but those below `steps`; renews a freeze of the same token.

        Those that it holds back wait for `holder`, in words. Raises ConfigError if another snapshot holds them already.
        """

    def holds_back(self, worker: int, step: int) -> bool:
        """Whether a freeze holds this step of a worker back now."""

    def resume(self, token: str) -> None:
        """Let changes continue; does nothing if that freeze is over."""

class ServerLog:
    """The newest segment of a log; see phalanx.ps.server.log.Log."""

    def __init__(self, directory: str, is_durable: bool) -> None: ...
    def append(self, buffers: Sequence[bytes | memoryview]) -> int: ...
    def sync(self, position: int) -> None: ...
    def open(self, path: str) -> None: ...
    def close(self) -> None: ...
    @property
    def position(self) -> int: ...
    @property
    def syncs(self) -> int:
        """Fsyncs so far."""

class ServerEngine(DataHandler):
    """Pulls and pushes of a server, on all cores; see csrc/server_engine.h."""

    def __init__(self, gate: WriteGate, failed: Callable[[PhalanxError], None]) -> None: ...
    def counts(self) -> dict[str, float]: ...
    def replay(self, client: int, seq: int, step: int, weight: float, updates: Sequence[_Update]) -> None:
        """Apply a push from the log."""

    def put_table(self, salt: int, name: str, json_name: str, dividing_rule: str, table: EmbeddingTable) -> None: ...
    def set_clocks(self, clocks: ServerClocks) -> None: ...
    def set_log(self, log: ServerLog) -> None: ...
    def set_budget(self, bytes: int) -> None: ...
    def complete_steps(self) -> int:
        """Apply the steps that every live worker has pushed; returns how many gradients were dropped."""

    def append_pending(self) -> None:
        """Write the pushes of a step that is not complete to the log again."""

    def withhold(self, worker: int) -> int:
        """Let a lost worker's push of a step that is not complete count no more; returns its pushes with that one."""

    def withheld(self) -> list[int]:
        """Return the workers whose push of an open step does not count, or not yet."""
    def restore_withheld(self, worker: int) -> None:
        """Withhold the push of a worker that the log behind a base has."""
    def settle(self, worker: int, pushes: int) -> None:
        """Count a push that is withheld if it is among the worker's first `pushes`, and drop it if not."""

    def admit(self, client: int, worker: int) -> bool:
        """Make a worker's client; returns whether it takes the place of an earlier process of that worker."""

    def clients(self) -> list[tuple[int, int, int, str, int | None]]: ...
    def restore_client(self, client: int, worker: int, last: int, reply: str, dropped: int | None) -> None: ...
    def worker_of(self, client: int) -> int | None: ...
    def earlier_reply(self, client: int, seq: int) -> str | None:
        """Return what a request was answered that was done before, as JSON; None for a new one."""

    def record_reply(self, client: int, seq: int, reply: str) -> None: ...
    def forget_pulls(self) -> None:
        """Forget the keys of every pull, as a restart does."""

    def stop(self) -> None:
        """Refuse new pushes."""

class EmbeddingTable:
    """A table of rows by 64-bit id; see phalanx.ps.table.table.RowTable."""

    def __init__(self, spec: object, layout: object, salt: int, folder: str) -> None: ...
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
    def require_room(self) -> None: ...
    def require_room_to_shrink(self) -> None: ...
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
    def begin_moment(self, since: int) -> int: ...
    def read_moment(
        self, moment: int, shard: int
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
    def end_moment(self, moment: int) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def stored(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def file_reads(self) -> int: ...
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
    def pulled(self) -> int: ...
    @property
    def missed(self) -> int: ...
    @property
    def tick(self) -> int: ...

_Bags = tuple[
    numpy.typing.NDArray[numpy.int64],
    numpy.typing.NDArray[numpy.int64],
    int,
    bool,
    numpy.typing.NDArray[numpy.float32] | None,
]
"""Place of each id's row; where each bag begins and the last one ends; place that counts in no bag, or -1; whether bags
are means; weights of ids."""

def pool_bags(
    bags: list[_Bags],
    rows: list[numpy.typing.NDArray[numpy.float32]],
    pooled: list[numpy.typing.NDArray[numpy.float32]],
) -> None:
    """Writes the pooled rows of the bags of several tables; they have no weights."""

def add_bag_gradients(
    bags: list[_Bags],
    gradients: list[numpy.typing.NDArray[numpy.float32]],
    sums: list[numpy.typing.NDArray[numpy.float32]],
) -> None:
    """Adds to the rows of sums, for several tables, what they get of the gradients of the bags they are in."""

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

class MemoryBudget:
    """Bytes that all connections of a process may hold together."""

    def __init__(self, limit: int) -> None: ...
    def take(self, count: int) -> bool: ...
    def give(self, count: int) -> None: ...
    @property
    def limit(self) -> int: ...
    @property
    def used(self) -> int: ...

class AttachedSegments:
    """Shared memory that a client handed over."""

    def __init__(self) -> None: ...
    def attach(self, number: int, size: int, fd: int) -> numpy.typing.NDArray[numpy.uint8]: ...
    def find(self, number: int) -> numpy.typing.NDArray[numpy.uint8]: ...

class DataHandler:
    """Answers pulls and pushes; see csrc/server_request.h."""

class ServerContext:
    """What the sessions of a server share."""

    def __init__(
        self,
        handler: DataHandler | None,
        name: str,
        max_frame_bytes: int,
        budget: MemoryBudget,
        log_failure: Callable[[str], None],
    ) -> None: ...
    def stop(self) -> None: ...
    def answer(
        self,
        peer: str,
        client: int,
        kind: int,
        seq: int,
        object: bytes,
        payload: numpy.typing.NDArray[numpy.uint8],
        report_wait: Callable[[str, bool], None],
    ) -> tuple[int, bytes, numpy.typing.NDArray[numpy.uint8]]: ...

class DataSession:
    """A client's pulls and pushes; see csrc/wire_session.h."""

    def __init__(self, context: ServerContext, segments: AttachedSegments, client: int, peer: str) -> None: ...
    def serve(
        self,
        fd: int,
        is_unix: bool,
        ahead: numpy.typing.NDArray[numpy.uint8],
        start: int,
        end: int,
        descriptors: list[int],
        tls: TlsStream | None = None,
    ) -> tuple[bool, int, int, list[int]]: ...

class TlsContext:
    """What the TLS streams of one end share; see csrc/wire_tls.h."""

    @staticmethod
    def client() -> TlsContext: ...
    @staticmethod
    def server(certificate: bytes, key: bytes) -> TlsContext: ...

class TlsStream:
    """One end of a TLS connection; see csrc/wire_tls.h."""

    def __init__(self, context: TlsContext, fd: int) -> None: ...
    def shake_hands(self) -> int: ...
    def peer_certificate(self) -> bytes: ...
    def receive(self, memory: memoryview) -> int: ...
    def send(self, parts: list[memoryview]) -> int: ...

class KeyPartition:
    """Which of a table's ids go to which server."""

    def __init__(self, keys: numpy.typing.NDArray[numpy.int64], salt: int, servers: int) -> None: ...
    @property
    def size(self) -> int: ...

class PartitionedRequest:
    """A pull or push, cut by server; see csrc/partition.h."""

    def __init__(self) -> None: ...
    def add_push(
        self,
        partition: KeyPartition,
        pulls: numpy.typing.NDArray[numpy.uint64] | None,
        values: numpy.typing.NDArray[numpy.float32],
        kind: int,
        lr: float | None,
        counts: numpy.typing.NDArray[numpy.uint32] | None,
        shows: numpy.typing.NDArray[numpy.float32] | None,
        clicks: numpy.typing.NDArray[numpy.float32] | None,
        is_narrow: bool,
    ) -> None: ...
    def add_pull(self, partition: KeyPartition, dim: int, is_narrow: bool) -> None: ...
    def counts(self, server: int) -> tuple[int, int]: ...
    def read_servers(self) -> list[int]: ...
    def heads(self, server: int, with_keys: bool) -> bytes: ...
    def payload_bytes(self, server: int, with_keys: bool) -> int: ...
    def write(self, server: int, with_keys: bool, memory: numpy.typing.NDArray[numpy.uint8]) -> None: ...
    def rows_bytes(self, server: int) -> int: ...
    def rows(self, payload: numpy.typing.NDArray[numpy.uint8]) -> list[numpy.typing.NDArray[numpy.float32]]: ...
    def merge_parts(
        self,
        payloads: Sequence[tuple[int, numpy.typing.NDArray[numpy.uint8]]],
        into: list[numpy.typing.NDArray[numpy.float32]],
    ) -> None:
        """Put the rows of each server to their places."""

    def merge_replies(self, sent: SentRequest, into: list[numpy.typing.NDArray[numpy.float32]]) -> None:
        """Put the rows of all replies to their places."""

class SentRequest:
    """A pull or push on its way to all its servers; see csrc/client_link.h."""

    def __init__(self, request: Any, servers: Sequence[int]) -> None: ...
    @property
    def size(self) -> int: ...
    def is_done_by_all(self) -> bool: ...
    def part(self, server: int) -> tuple[int, numpy.typing.NDArray[numpy.uint8], Any]:
        """Return the number, the payload and its lease (None if it is not shared) of a part under way."""

    def reply(self, server: int) -> tuple[int, int, int, numpy.typing.NDArray[numpy.uint8]] | None:
        """Return status, number, dropped and rows, or None as long as no reply has come natively."""

    def rows(self, server: int) -> numpy.typing.NDArray[numpy.uint8]:
        """Return the rows of a reply that has come natively."""

    def numbers(self, by_server: numpy.typing.NDArray[numpy.uint64]) -> None:
        """Write the number of each reply to the place of its server."""

class ClientLink:
    """A client's socket to one server; see csrc/client_link.h."""

    seq: int
    is_reading: bool
    was_read: bool
    has_waiter: bool
    has_ended: bool
    has_answered: bool

    def __init__(
        self,
        channel: Any,
        buffer: numpy.typing.NDArray[numpy.uint8],
        client: int,
        seq: int,
        most_bytes: int,
        writing: Any,
    ) -> None: ...
    def lend_memory(self, memory: numpy.typing.NDArray[numpy.uint8], lease: Any) -> None: ...
    def first_due(self) -> tuple[Any, int] | None:
        """Return the owner and the server of the first part under way."""

    def hand_over(self, owner: Any, queue: Any, pending: Any) -> bool:
        """Append what stands for the first part under way to Python's queue; False if that is another part by now."""

class Reading:
    """Replies of several servers as they are read; see csrc/bind_client.cc."""

    def __init__(self) -> None: ...
    def begin(self, sent: SentRequest, links: list[ClientLink]) -> bool: ...
    def receive(self, patience_s: float, hold_s: float) -> None: ...
    def end(self, waited: list[int], for_python: list[int]) -> None: ...
    def drop(self) -> None: ...

class UnfinishedFrames:
    """Frames that are not out whole, and the locks of their links; see csrc/bind_client.cc."""

    def __init__(self) -> None: ...
    def first(self) -> tuple[int, int, bytes] | None:
        """Return server, errno and what was not written of the one with the shortest rest."""

    def release_first(self) -> None: ...
    def drop(self) -> None:
        """Break the links of all that are left, and unlock them."""

def send_parts(
    sent: SentRequest,
    owner: Any,
    request: Any,
    links: list[ClientLink],
    kind: int,
    step: int,
    weight: float,
    keep: bool,
    lacking: list[tuple[int, int]],
    unfinished: UnfinishedFrames,
) -> bool:
    """Write the frames of all parts as far as sockets take them. See csrc/bind_client.cc."""
