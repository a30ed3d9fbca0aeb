"""Files of click logs as datasets: every row once, whatever is shuffled, broken off or resumed."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data import ShardedLoader
from phalanx.data.ctr.in_memory_dataset import InMemoryDataset
from phalanx.data.ctr.queue_dataset import QueueDataset
from phalanx.data.ctr.slot_files import SlotReader, list_files
from phalanx.data.ctr.slot_rows import SlotRows, join
from phalanx.data.ctr.slots import SlotSchema, criteo_schema, parse_slots
from phalanx.data.stream.file_sources import LeasedFiles, SplitFiles, merge_states
from phalanx.data.stream.prefetch_queue import PrefetchQueue
from phalanx.errors import ConfigError, DataError
from phalanx.ps.stores.local import LocalStore

SCHEMA = SlotSchema(dense=("row",), sparse=("user",))
TOKENS = SlotSchema(dense=("row",), sparse=("user", "item"), format="tokens")
SIZES = (7, 1, 12, 5)
ROWS = sum(SIZES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four files whose dense field counts the rows 0 to 24."""
    row = iter(range(ROWS))
    for number, size in enumerate(SIZES):
        lines = (f"{i % 2}\t{i}\tu{i % 3}\n" for i in (next(row) for _ in range(size)))
        (tmp_path / f"part-{number}").write_text("".join(lines))
    return tmp_path


def seen(batches: object) -> list[int]:
    return [int(i) for batch in batches for i in batch[0][:, 0]]  # type: ignore[attr-defined]


def queue(folder: Path, shard: tuple[int, int] = (0, 1), rows: int = 4, **more: object) -> QueueDataset:
    source = SplitFiles(list_files(folder), shard)
    return QueueDataset(folder, SCHEMA, batch_size=rows, source=source, **more)  # type: ignore[arg-type]


# --- streaming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_read_every_row_once(folder: Path, workers: int) -> None:
    parts = [seen(queue(folder, (index, workers))) for index in range(workers)]
    assert sorted(i for part in parts for i in part) == list(range(ROWS))
    assert parts[0][:7] == list(range(7))


def test_a_batch_reaches_over_files_and_the_last_one_is_short_or_dropped(folder: Path) -> None:
    dataset = queue(folder, rows=10)
    assert [len(label) for _, _, label in dataset] == [10, 10, 5]
    assert [len(label) for _, _, label in dataset] == [10, 10, 5]  # the next epoch
    assert [len(label) for _, _, label in queue(folder, rows=10, drop_last=True)] == [10, 10]


@given(stop=st.integers(1, 7), rows=st.integers(1, 9), resumed_rows=st.integers(1, 9), data=st.data())
def test_a_resumed_job_reads_the_rest_once(
    tmp_path_factory: pytest.TempPathFactory, stop: int, rows: int, resumed_rows: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "four-files"
    if not folder.exists():
        folder.mkdir()
        row = iter(range(ROWS))
        for number, size in enumerate(SIZES):
            text = "".join(f"0\t{i}\tu\n" for i in (next(row) for _ in range(size)))
            (folder / f"part-{number}").write_text(text)
    before, after = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    done: list[int] = []
    states = []
    for index in range(before):
        dataset = queue(folder, (index, before), rows)
        for step, batch in enumerate(dataset, 1):
            done += seen([batch])
            if step == stop:
                break
        states.append(dataset.state_dict())
    for index in range(after):
        resumed = queue(folder, (index, after), resumed_rows)
        resumed.load_state_dict(merge_states(states))
        if resumed.source.next_epoch() == 0:
            done += seen(resumed)
    assert sorted(done) == list(range(ROWS))


def test_a_loop_that_is_left_leaves_no_thread(folder: Path) -> None:
    for _ in queue(folder, rows=1):
        break
    assert not [t for t in threading.enumerate() if t.name == "phalanx reader"]


def test_a_reader_stays_a_bounded_number_of_batches_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    for i in PrefetchQueue(items, 3):
        assert len(made) <= i + 5
    assert len(made) == 100


def test_an_error_of_the_reader_reaches_the_loop(folder: Path) -> None:
    (folder / "part-2").write_text("0\t1\tu\n0\toops\tu\n")
    with pytest.raises(DataError, match=r"part-2, line 2: field 2 \(row\): found 'oops'.*on_corrupt=\"skip\""):
        list(queue(folder))


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("phalanx_propagates")
def test_broken_lines_are_counted_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "part-2").write_text("0\t1\tu\nx\n0\t2\tu\n\n")
    dataset = queue(folder, on_corrupt="skip")
    assert len(seen(dataset)) == ROWS - SIZES[2] + 2
    assert dataset.corrupt.count == 2
    assert "part-2, line 2: found 1 fields, expected 3" in caplog.text
    assert "2 of the file's 4 lines are broken and were left out" in caplog.text


def test_blocks_end_where_lines_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = join(list(SlotReader(SCHEMA).blocks(folder / "part-2")))
    monkeypatch.setattr("phalanx.data.ctr.slot_files.BLOCK_BYTES", 5)
    pieces = list(SlotReader(SCHEMA).blocks(folder / "part-2", first_row=3))
    assert len(pieces) > 4
    assert join(pieces).dense.tolist() == whole.dense[3:].tolist()
    (folder / "part-2").write_text("0\t1\tu\n0\t2\tu\n0\tx\tu\n")
    with pytest.raises(DataError, match="line 3: field 2"):
        list(SlotReader(SCHEMA).blocks(folder / "part-2"))


def test_compressed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"1\t2\tu\n" * 3))
    assert seen(queue(tmp_path)) == [2, 2, 2]
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"1\t2\tu\n" * 3)[:-9])
    with pytest.raises(DataError, match=r"a.gz: the gzip data is broken"):
        list(queue(tmp_path))


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere, which is neither a file nor a folder"):
        QueueDataset(tmp_path / "nowhere", SCHEMA)
    with pytest.raises(ConfigError, match=r"read the files \[\]"):
        QueueDataset(tmp_path, SCHEMA)
    with pytest.raises(DataError, match="gone: cannot be read"):
        list(QueueDataset([tmp_path / "gone"], SCHEMA, batch_size=2))


def test_a_state_of_other_files_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"state of the files \['x'\], but this worker reads \[.*merge_states"):
        queue(folder).load_state_dict({"version": 1, "files": {"x": [0, 0]}})


def test_the_criteo_format(tmp_path: Path) -> None:
    line = "\t".join(["1", *map(str, range(13)), *(f"{i:08x}" for i in range(26))])
    (tmp_path / "train.txt").write_text(line + "\n" + line.replace("\t5\t", "\t\t") + "\n")
    ((dense, ids, label),) = QueueDataset(tmp_path, criteo_schema(1_000_001), batch_size=2)
    assert (dense.shape, ids.shape, label.tolist()) == ((2, 13), (2, 26), [1, 1])
    assert dense[1].tolist() == [*range(5), 0, *range(6, 13)]
    assert 0 <= ids.min() < ids.max() <= 1_000_000


# --- in memory ------------------------------------------------------------------------------------------------------


def in_memory(folder: Path, **more: object) -> InMemoryDataset:
    dataset = InMemoryDataset(folder, SCHEMA, batch_size=4, **more)  # type: ignore[arg-type]
    dataset.load_into_memory()
    return dataset


def test_a_shuffle_is_a_new_order_of_the_same_rows(folder: Path) -> None:
    dataset = in_memory(folder)
    orders = [seen(dataset)]
    for shuffle in (dataset.local_shuffle, dataset.local_shuffle, dataset.global_shuffle):
        shuffle()
        orders.append(seen(dataset))
    assert orders[0] == list(range(ROWS)) == sorted(orders[1]) == sorted(orders[2]) == sorted(orders[3])
    assert len({tuple(order) for order in orders}) == 4
    again, other = in_memory(folder), in_memory(folder, seed=1)
    again.local_shuffle()
    other.local_shuffle()
    assert seen(again) == orders[1] != seen(other)


def test_a_resumed_epoch_goes_on_in_the_same_order(folder: Path) -> None:
    dataset = in_memory(folder)
    dataset.global_shuffle()
    dataset.local_shuffle()
    whole = seen(dataset)
    for _ in zip(range(3), dataset, strict=False):
        state = dataset.state_dict()
    resumed = in_memory(folder)
    resumed.load_state_dict(state)
    assert seen(resumed) == whole[12:]
    assert seen(resumed) == whole


def test_rows_are_loaded_before_they_are_used_and_can_be_let_go(folder: Path) -> None:
    dataset = InMemoryDataset(folder, SCHEMA, batch_size=4)
    with pytest.raises(ConfigError, match=r"Call load_into_memory\(\) first"):
        next(iter(dataset))
    for _ in range(2):
        dataset.load_into_memory()
        assert dataset.rows == ROWS
        dataset.release_memory()
    (folder / "empty").touch()
    with pytest.raises(ConfigError, match="found no rows in its part of 1 files"):
        InMemoryDataset(folder / "empty", SCHEMA).load_into_memory()


def test_a_state_that_does_not_fit_is_refused(folder: Path) -> None:
    dataset = in_memory(folder)
    next(iter(dataset))
    state = dataset.state_dict()
    with pytest.raises(ConfigError, match="inside an epoch by 2 workers, but there are 1"):
        dataset.load_state_dict({**state, "workers": 2})
    with pytest.raises(ConfigError, match="Make it with the saved seed"):
        dataset.load_state_dict({**state, "seed": 3})


# --- both -----------------------------------------------------------------------------------------------------------


def test_a_loader_takes_ready_batches_and_says_what_they_count(folder: Path) -> None:
    loader = ShardedLoader(queue(folder), batch_size=10)
    assert [(loader.share.rows, loader.share.global_rows) for _ in loader] == [(10, 10), (10, 10), (5, 5)]  # type: ignore[union-attr]
    assert len(list(ShardedLoader(in_memory(folder), global_batch=10, drop_last=True))) == 2


def test_worker_processes_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.data.ctr.slot_dataset.get_worker_info", lambda: object())
    with pytest.raises(ConfigError, match="leave num_workers at 0"):
        iter(queue(folder))


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("set_use_var", "SlotSchema"),
        ("set_pipe_command", "parsed natively"),
        ("start", "no EOFException, no reset"),
        ("set_sample_generator", "for dense, ids, label in dataset"),
    ],
)
def test_words_of_older_frameworks_say_what_to_write(folder: Path, word: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"'{word}' belongs to an older framework. Write instead: .*{instead}"):
        getattr(QueueDataset(folder, SCHEMA), word)


def test_words_of_fleet_that_stay(folder: Path) -> None:
    dataset = QueueDataset(folder, SCHEMA)
    with pytest.raises(ConfigError, match="Give batch_size="):
        iter(dataset)
    dataset.set_batch_size(3)
    dataset.set_filelist([folder / "part-3"])
    assert [len(label) for _, _, label in dataset] == [3, 2]
    with pytest.raises(ConfigError, match="batches of 0 rows"):
        dataset.batches(0)
    with pytest.raises(ConfigError, match="on_corrupt='count'"):
        QueueDataset(folder, SCHEMA, on_corrupt="count")  # type: ignore[arg-type]


@given(order=st.permutations(range(5)), start=st.integers(0, 5), count=st.integers(0, 5))
def test_rows_of_many_ids_are_picked_cut_and_joined_like_lines(order: list[int], start: int, count: int) -> None:
    lines = [f"{i % 2} row:{i} " + " ".join([f"user:{i}"] * (i % 3) + [f"item:{i}"] * (4 - i)) for i in range(5)]

    def parse(picked: list[str]) -> SlotRows:
        return parse_slots("\n".join(picked).encode(), TOKENS).rows

    def same(a: SlotRows, b: SlotRows) -> bool:
        return all(np.array_equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True))

    rows = parse(lines)
    assert same(rows.take(np.array(order, np.int64)), parse([lines[i] for i in order]))
    stop = min(start + count, 5)
    assert len(rows.slice(start, stop)) == stop - start
    if start < stop:
        assert same(rows.slice(start, stop), parse(lines[start:stop]))
        assert same(join([rows.slice(0, start), rows.slice(start, 5)]), rows)


# --- leases ---------------------------------------------------------------------------------------------------------


class Server:
    """What the first parameter server keeps, and every call."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.taken: set[str] = set()
        self.calls: list[tuple[str, int, bool]] = []

    def lease(self, epoch: int, files: Sequence[str]) -> tuple[str | None, int, int]:
        free = [f for f in files if f not in self.taken]
        self.taken.update(free[:1])
        return (free[0], self.rows.get(free[0], 0), len(free)) if free else (None, 0, 0)

    def report_progress(self, epoch: int, file: str, offset: int, *, end: bool = True) -> None:
        self.calls.append((Path(file).name, offset, end))
        self.rows[file] = offset


def leased(folder: Path, server: Server) -> QueueDataset:
    return QueueDataset(folder, SCHEMA, batch_size=4, source=LeasedFiles(server, list_files(folder)))


def test_a_worker_that_asks_gets_the_next_free_file(folder: Path) -> None:
    server = Server()
    first, second = iter(leased(folder, server)), iter(leased(folder, server))
    found = seen([next(first), next(second)]) + seen(first) + seen(second)
    assert sorted(found) == list(range(ROWS))
    assert sorted(server.calls) == [(f"part-{i}", size, True) for i, size in enumerate(SIZES)]


def test_a_worker_that_starts_again_reads_on_where_the_tables_store_says(folder: Path) -> None:
    store = LocalStore()
    source = LeasedFiles(store, list_files(folder))
    dataset = QueueDataset(folder, SCHEMA, batch_size=4, source=source)
    assert [seen(dataset) for _ in range(3)] == [list(range(ROWS))] * 3
    again = QueueDataset(folder, SCHEMA, batch_size=4, source=LeasedFiles(store, source.files))
    assert [len(seen(again)) for _ in range(4)] == [0, 0, 0, ROWS]


def test_progress_is_reported_once_a_batch_is_trained_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.data.stream.file_sources.REPORT_ROWS", 4)
    server = Server()
    batches = iter(leased(folder, server))
    next(batches)
    assert server.calls == []
    next(batches)
    assert server.calls == [("part-0", 4, False)]
    batches.close()
    # The worker is gone; another continues from the last report.
    server.taken.clear()
    assert seen(leased(folder, server)) == list(range(4, ROWS))
