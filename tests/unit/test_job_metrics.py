"""Run events of ranks, read piece by piece."""

import os

from phalanx.jobs.attempt import metrics


def test_events_are_read_whole_and_once(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    file = logs / "events.worker.10.jsonl"
    file.write_text('{"step": 0, "loss": 1.5}\n{"step": 1, "lo')
    (logs / "events.worker.2.jsonl").write_text("")
    assert metrics.ranks(tmp_path) == ["worker.2", "worker.10"]
    first = metrics.read(tmp_path, "worker.10")
    assert first.events == [{"step": 0, "loss": 1.5}]
    with file.open("a") as more:
        more.write('ss": 1.25}\nnoise\n{"step": 2}\n')
    second = metrics.read(tmp_path, "worker.10", first.offset)
    assert second.events == [{"step": 1, "loss": 1.25}, {"step": 2}]
    assert metrics.read(tmp_path, "worker.10", second.offset) == metrics.Reports("worker.10", [], second.offset)


def test_no_rank_leads_out_of_the_folder(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "other.jsonl").write_text('{"step": 0}\n')
    assert metrics.read(tmp_path, "../../other").events == []


def test_whatever_a_job_leaves_there_is_no_event_or_can_be_sent(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "events.worker.0.jsonl").write_text("[" * 100_000 + "\n" + '{"step": "\\ud800"}\n[1]\n{"step": 3}\n')
    os.mkfifo(logs / "events.worker.1.jsonl")  # opened, it would be waited for without end
    (logs / "events.worker.2.jsonl").mkdir()
    (logs / os.fsdecode(b"events.\xff.jsonl")).write_text('{"step": 0}\n')
    assert metrics.ranks(tmp_path) == ["worker.0"]
    assert metrics.read(tmp_path, "worker.0").events == [{"step": 3}]
