"""The event file holds one line of strict JSON per report, whatever numbers a script has at hand."""

import contextlib
import json
import math

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from phalanx.comm.events.event_file import append_event
from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import ConfigError
from phalanx.jobs import paths
from phalanx.jobs.attempt import metrics
from phalanx.parallel import session
from phalanx.train import events
from phalanx.train.events import EventStream


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


@pytest.fixture
def stream(path):
    with contextlib.closing(EventStream(str(path))) as opened:
        yield opened


def strict(line: str) -> dict[str, object]:
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_tensors_and_numpy_numbers_and_words_are_written(path, stream):
    assert stream.report(7, loss=torch.tensor(0.5), rate=np.float32(0.25), rows=np.int64(3), phase="warm")
    event = strict(path.read_text())
    assert {k: event[k] for k in ("step", "loss", "rate", "rows", "phase")} == {
        "step": 7, "loss": 0.5, "rate": 0.25, "rows": 3, "phase": "warm",
    }  # fmt: skip


@pytest.mark.parametrize(("loss", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (torch.tensor(-math.inf), "-inf")])
def test_a_loss_that_is_no_number_stays_json(path, stream, loss, shown):
    stream.report(0, loss=loss)
    assert strict(path.read_text())["loss"] == shown


def test_what_is_no_step_has_a_kind_and_is_no_metric(path, monkeypatch):
    monkeypatch.delenv("PHALANX_EVENTS_FILE", raising=False)
    assert not append_event("balance"), "there is no file"
    monkeypatch.setenv("PHALANX_EVENTS_FILE", str(path))
    assert append_event("balance", unit="samples", before=[8, 8])
    event = strict(path.read_text())
    assert (event["kind"], event["unit"], event["before"]) == ("balance", "samples", [8, 8])
    logs = paths.logs(path.parent / "attempt")
    logs.mkdir(parents=True)
    (logs / "events.worker.0.jsonl").write_text(path.read_text() + '{"step": 3, "loss": 0.5}\n')
    assert metrics.read(path.parent / "attempt", "worker.0").events == [{"step": 3, "loss": 0.5}]


def test_reports_close_together_are_counted_and_not_written(path, stream):
    assert [stream.report(loss=1.0) for _ in range(3)] == [True, False, False]
    assert len(path.read_text().splitlines()) == 1
    stream.close()
    assert not stream.report(loss=1.0)


@pytest.mark.parametrize(("value", "named"), [(torch.ones(2), r"one number, found a tensor of shape \(2,\)"),
                                              ([1], "takes a number or a word, found list")])  # fmt: skip
def test_anything_else_is_refused(stream, value, named):
    with pytest.raises(ConfigError, match=named):
        stream.report(loss=value)


def test_rows_a_second_are_those_that_the_loader_counted_between_two_events(path, monkeypatch):
    clock, rows = [100.0], [(0, 0)]
    monkeypatch.setattr("phalanx.train.events.time.time", lambda: clock[0])
    with contextlib.closing(EventStream(str(path), lambda: rows[0])) as stream:
        for epoch, read, seconds in (
            (0, 64, 0.0),
            (0, 192, 0.5),
            (0, 256, 0.1),
            (0, 384, 0.4),
            (1, 64, 1.0),
            (1, 128, 1.0),
        ):
            clock[0] += seconds
            rows[0] = (epoch, read)
            stream.report(loss=1.0)
        clock[0] += 1.0
        stream.report(samples_per_s=7.0)
    found = [strict(line).get("samples_per_s") for line in path.read_text().splitlines()]
    # The third is too soon after the second; the epoch begins between the fourth and the fifth.
    assert found == [None, 256.0, 384.0, None, 64.0, 7.0]


def test_rows_are_those_that_a_distributed_loader_handed_out_to_all_ranks(monkeypatch):
    loader = ShardedLoader(TensorDataset(torch.zeros(40, 1)), global_batch=16)
    monkeypatch.setattr(session.session, "loader", loader)
    for _ in range(2):
        epoch = loader.epoch
        assert [events._rows_read() for _ in loader] == [(epoch, 16), (epoch, 32), (epoch, 40)]
    monkeypatch.setattr(session.session, "loader", None)
    assert events._rows_read() is None
