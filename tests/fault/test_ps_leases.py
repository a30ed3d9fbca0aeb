"""Servers are killed while workers stream files that server 0 leases: every row is trained once in each epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from phalanx.data.ctr.queue_dataset import QueueDataset
from phalanx.data.ctr.slot_files import list_files
from phalanx.data.ctr.slots import SlotSchema
from phalanx.data.stream.file_sources import LeasedFiles
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from ps_kills import WORKERS, Progress, kill_while
from ps_requests import SPEC
from ps_servers import SECRET, servers

pytestmark = pytest.mark.fault

FILES, ROWS, BATCH, EPOCHS = 8, 60, 5, 2
SCHEMA = SlotSchema(dense=("row",), sparse=())


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    for number in range(FILES):
        rows = range(number * ROWS, (number + 1) * ROWS)
        (folder / f"part-{number}").write_text("".join(f"0\t{row}\n" for row in rows))
    return folder


def test_every_row_is_trained_once_in_each_epoch(tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Progress is reported within files too, not at their ends alone.
    monkeypatch.setattr("phalanx.data.stream.file_sources.REPORT_ROWS", 2 * BATCH)
    handed_out: list[Counter[int]] = [Counter() for _ in range(WORKERS)]

    def train(worker: int, progress: Progress) -> None:
        store = RemoteStore(
            made.endpoints, secret=SECRET, worker=worker, workers=WORKERS, mode="async", timeout_s=60.0, retry_s=60.0
        )
        store.declare([SPEC])
        dataset = QueueDataset(logs, SCHEMA, batch_size=BATCH, source=LeasedFiles(store, list_files(logs)))
        step = 0
        for _ in range(EPOCHS):
            for dense, *_ in dataset:
                ids = dense[:, 0].numpy().astype(np.int64)
                handed_out[worker].update(ids.tolist())
                store.pull([PullSpec(SPEC.name, ids)], step=step).rows()
                store.push([TableUpdate(SPEC.name, ids, np.ones((len(ids), SPEC.dim), np.float32))], step=step)
                step += 1
                progress.one()
        store.leave()
        connected.append(store)  # servers end when all have left and nobody is connected

    connected: list[RemoteStore] = []
    with servers(2, tmp_path, {"PHALANX_SERVER_RETRY_S": "60"}, state=True, log_bytes=20_000) as made:
        kill_while(made, FILES * ROWS * EPOCHS // BATCH // WORKERS, 4, 3, train)
        store = RemoteStore(made.endpoints, secret=SECRET, worker=0, workers=WORKERS, mode="async")
        store.declare([SPEC])
        (rows,) = store.pull([PullSpec(SPEC.name, np.arange(FILES * ROWS))]).rows()
        for each in (store, *connected):
            each.close()
    assert sum(handed_out, Counter()) == Counter(dict.fromkeys(range(FILES * ROWS), EPOCHS))
    assert set(rows.ravel().tolist()) == {-float(EPOCHS)}
