"""What a checkpoint says of its logical replicas, and what it may not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import DataError
from phalanx.parallel.data.replicas.replica_record import ReplicaRecord


@pytest.mark.parametrize(
    "record",
    [
        ReplicaRecord(4, 1, False),
        ReplicaRecord(3, 2, True),
        ReplicaRecord(2, 1, False, "an obstacle", True, "a rounding"),
        ReplicaRecord(2, 1, False, index=1, labels_per_row=128),
    ],
)
def test_a_record_is_read_as_it_was_written(record: ReplicaRecord) -> None:
    assert ReplicaRecord.read(record.values(), Path("step-1")) == record


@pytest.mark.parametrize(
    "change",
    [
        {"count": 0},
        {"count": True},
        {"count": 2.0},
        {"count": None},
        {"threads": "1"},
        {"threads": -1},
        {"is_asked": 1},
        {"obstacle": ["why"]},
        {"rounding": 1},
        {"has_means": 1},
        {"index": -1},
        {"index": True},
        {"labels_per_row": 0},
        {"labels_per_row": 2.0},
    ],
)
def test_what_no_save_writes_is_an_error_that_names_the_checkpoint(change: dict[str, Any]) -> None:
    values = {**ReplicaRecord(4, 1, False).values(), **change}
    with pytest.raises(DataError, match=r"step-1 says of its logical replicas .* which no save writes"):
        ReplicaRecord.read(values, Path("step-1"))
