"""Broken records left out on two ranks: counted alike, and found out where the ranks' files differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx
from phalanx.data import Cifar10Dataset, QueueDataset, ShardedLoader, SlotSchema
from phalanx.data.readers.cifar import RECORD_BYTES, TRAIN_FILES
from phalanx.errors import DataError
from ranks import run_ranks

pytestmark = pytest.mark.dist


def _cifar(folder: Path, broken: tuple[int, ...]) -> Path:
    folder.mkdir()
    for number, name in enumerate(TRAIN_FILES):
        records = np.zeros((2, RECORD_BYTES), np.uint8)
        records[:, 0] = [99 if 2 * number + i in broken else 2 * number + i for i in range(2)]
        (folder / name).write_bytes(records.tobytes())
    return folder


def _rank(folder: str) -> Any:
    phalanx.init()
    root, rank = Path(folder), phalanx.current().rank
    images = Cifar10Dataset(root / "same", on_corrupt="skip")
    labels = [label for _ in range(2) for _, batch in ShardedLoader(images, global_batch=4) for label in batch.tolist()]
    logs = QueueDataset(root / "logs", SlotSchema(dense=["age"], sparse=["user"]), batch_size=2, on_corrupt="skip")
    rows = sum(len(batch[0]) for batch in ShardedLoader(logs, batch_size=2))
    other = Cifar10Dataset(root / f"rank{rank}", on_corrupt="skip")
    with pytest.raises(DataError) as raised:
        next(iter(ShardedLoader(other.batch(2))))
    return labels, images.corrupt.global_count, rows, logs.corrupt.count, logs.corrupt.global_count, str(raised.value)


def test_ranks_count_the_records_left_out_alike(tmp_path: Path) -> None:
    _cifar(tmp_path / "same", broken=(3, 8))
    _cifar(tmp_path / "rank0", broken=())
    _cifar(tmp_path / "rank1", broken=(0,))
    (tmp_path / "logs").mkdir()
    for part, lines in enumerate(("1\t2\tu\nx\n", "1\t2\tu\n0\t1\tv\n\ny\n1\tz\tw\n")):
        (tmp_path / "logs" / f"part-{part}").write_text(lines)
    outcomes = run_ranks(_rank, 2, str(tmp_path))
    found = list(outcomes)
    assert sorted(found[0][0] + found[1][0]) == sorted([0, 1, 2, 4, 5, 6, 7, 9] * 2)
    assert [one[1] for one in found] == [2, 2]
    assert [one[2:5] for one in found] == [(1, 1, 4), (2, 3, 4)]
    message = (
        "The ranks read different records of Cifar10Dataset: rank 0 has 10 and left out 0, rank 1 has 9 and left out 1"
    )
    assert all(message in one[5] for one in found)
