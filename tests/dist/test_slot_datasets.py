"""Click logs over real workers: every row on exactly one of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import phalanx as px
from phalanx.data import ShardedLoader
from phalanx.data.ctr.in_memory_dataset import InMemoryDataset
from phalanx.data.ctr.queue_dataset import QueueDataset
from phalanx.data.ctr.slots import SlotSchema
from phalanx.data.stream.file_sources import merge_states
from ranks import run_ranks

pytestmark = pytest.mark.dist

SIZES = (40, 3, 61, 17)
ROWS = sum(SIZES)
COLUMNS = SlotSchema(dense=("row",), sparse=("user",))
TOKENS = SlotSchema(dense=("row",), sparse=("user", "item"), format="tokens")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    row = iter(range(ROWS))
    for number, size in enumerate(SIZES):
        rows = [next(row) for _ in range(size)]
        (tmp_path / f"part-{number}.tsv").write_text("".join(f"0\t{i}\tu{i}\n" for i in rows))
        (tmp_path / f"part-{number}.tokens").write_text("".join(f"0 row:{i} {f'item:{i} ' * (i % 3)}\n" for i in rows))
    return tmp_path


def shuffled(folder: Path) -> list[tuple[list[int], list[int]]]:
    """The rows of this worker after one and after two global shuffles, with how many ids each row has."""
    px.init()
    dataset = InMemoryDataset(sorted(folder.glob("*.tokens")), TOKENS, batch_size=8)
    dataset.load_into_memory()
    found = []
    for _ in range(2):
        dataset.global_shuffle()
        rows, ids = [], []
        for dense, _, offsets, _ in dataset:
            rows += [int(i) for i in dense[:, 0]]
            ids += offsets.diff().reshape(-1, 2)[:, 1].tolist()
        found.append((rows, ids))
    return found


def test_a_global_shuffle_puts_every_row_on_one_worker_in_an_order_of_its_own(folder):
    alone, two, three = (run_ranks(shuffled, n, folder) for n in (1, 2, 3))
    for shuffle in range(2):
        whole = alone[0][shuffle]
        assert sorted(whole[0]) == list(range(ROWS)) != whole[0]
        assert whole[1] == [i % 3 for i in whole[0]]
        for parts in (two, three):
            assert min(len(part[shuffle][0]) for part in parts) > ROWS / len(parts) / 2
            assert [i for part in parts for i in part[shuffle][0]] == whole[0]
            assert [i for part in parts for i in part[shuffle][1]] == whole[1]
    assert alone[0][0] != alone[0][1]


def streamed(folder: Path) -> list[list[tuple[list[int], int, int]]]:
    """Two epochs of batches, with what each counts."""
    px.init()
    loader = ShardedLoader(QueueDataset(sorted(folder.glob("*.tsv")), COLUMNS), batch_size=20)

    def epoch() -> list[tuple[list[int], int, int]]:
        return [([int(i) for i in x[:, 0]], loader.share.rows, loader.share.global_rows) for x, _, _ in loader]

    return [epoch(), epoch()]


def test_two_workers_split_four_files_and_take_the_same_number_of_steps(folder):
    first, second = run_ranks(streamed, 2, folder)
    for epoch in range(2):
        assert len(first[epoch]) == len(second[epoch]) == 6  # 101 rows against 20
        assert [s[2] for s in first[epoch]] == [s[2] for s in second[epoch]] == [40, 20, 20, 20, 20, 1]
        report_bad_records = [i for rows, count, _ in first[epoch] + second[epoch] for i in rows[:count]]
        assert sorted(report_bad_records) == list(range(ROWS))


def rest_of(folder: Path, states: list[dict]) -> list[int]:
    px.init()
    dataset = QueueDataset(sorted(folder.glob("*.tsv")), COLUMNS, batch_size=7)
    dataset.load_state_dict(merge_states(states))
    return [int(i) for dense, _, _ in dataset for i in dense[:, 0]]


def broken_off(folder: Path) -> tuple[list[int], dict]:
    px.init()
    dataset = QueueDataset(sorted(folder.glob("*.tsv")), COLUMNS, batch_size=9)
    done: list[int] = []
    for dense, _, _ in itertools.islice(dataset, 2):
        done += [int(i) for i in dense[:, 0]]
    return done, dataset.state_dict()


def test_a_job_of_two_resumes_as_one_of_three(folder):
    first = run_ranks(broken_off, 2, folder)
    rest = run_ranks(rest_of, 3, folder, [state for _, state in first])
    assert sorted([i for part in rest for i in part] + first[0][0] + first[1][0]) == list(range(ROWS))
