"""The parts of the parameter-server benchmark that need no process: figures, batches, the peer's environment."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import bench_parameter_server, peers
from benchmarks.bench_parameter_server import examples_per_s, percentile_ms, plain_write
from benchmarks.parameter_server import bags
from benchmarks.parameter_server.jobs import results
from benchmarks.parameter_server.work import BATCH, DENSE, SLOTS, batches


def test_figure_is_all_examples_over_the_time_from_first_start_to_last_end():
    spans = [{"started": 10.0, "ended": 12.0, "examples": 512}, {"started": 11.0, "ended": 14.0, "examples": 512}]

    assert examples_per_s(spans) == 256.0


def test_percentile_of_few_steps_is_one_that_happened():
    assert percentile_ms([0.001, 0.002, 0.250], 99) == pytest.approx(250.0)


def test_every_engine_gets_the_same_batches_and_every_worker_its_own():
    first, again, other = batches(0), batches(0), batches(1)

    assert all(np.array_equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    assert not np.array_equal(first[0][0], other[0][0])
    ids, dense, click = first[0]
    assert (ids.shape, ids.dtype) == ((BATCH, SLOTS), np.int64)
    assert (dense.shape, dense.dtype) == ((BATCH, DENSE), np.float32)
    assert set(np.unique(click)) == {0.0, 1.0}


@pytest.mark.parametrize("ids", ["even", "zipf"])
def test_bags_are_the_same_for_every_engine_and_lie_in_their_tables(ids, monkeypatch):
    monkeypatch.setenv("BENCH_IDS", ids)
    monkeypatch.setenv("BENCH_STEPS", "2")
    first, again, other = bags.bag_batches(0), bags.bag_batches(0), bags.bag_batches(1)

    assert len(first) == 2
    for batch, same in zip(first, again, strict=True):
        assert all(np.array_equal(*slot) for slot in zip(batch.ids, same.ids, strict=True))
    assert not np.array_equal(first[0].ids[0], other[0].ids[0])
    for slot, rows in enumerate(bags.ROWS):
        drawn, lengths = first[0].ids[slot], first[0].lengths[slot]
        assert len(lengths) == BATCH
        assert lengths.sum() == len(drawn)
        assert 0 <= drawn.min() <= drawn.max() < rows
        assert lengths.mean() == pytest.approx(bags.MEAN_IDS[slot], rel=0.3)


def test_zipf_ids_repeat_more_often_than_even_ones(monkeypatch):
    monkeypatch.setenv("BENCH_STEPS", "1")
    distinct = {}
    for ids in ("even", "zipf"):
        monkeypatch.setenv("BENCH_IDS", ids)
        distinct[ids] = sum(len(np.unique(slot)) for slot in bags.bag_batches(0)[0].ids)
    assert distinct["zipf"] < 0.6 * distinct["even"]


def test_results_name_what_is_missing(tmp_path):
    (tmp_path / "span-0.json").write_text(json.dumps({"examples": 1}))

    assert results(tmp_path, "span", 1) == [{"examples": 1}]
    with pytest.raises(RuntimeError, match="2 workers were to leave a span, 1 did"):
        results(tmp_path, "span", 2)


def test_plain_write_writes_every_byte(tmp_path):
    assert plain_write(tmp_path / "file", (1 << 24) + 5) > 0
    assert (tmp_path / "file").stat().st_size == (1 << 24) + 5


class Commands:
    """Stands for the processes that `peers` starts: notes them, and fails those that say so."""

    def __init__(self):
        self.ran, self.failing = [], ""

    def __call__(self, command, **_):
        self.ran.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True, exist_ok=True)
        failed = bool(self.failing) and self.failing in command
        return SimpleNamespace(returncode=int(failed), stdout="", stderr="a warning\nERROR: no such version\n")


@pytest.fixture
def commands(monkeypatch):
    stand_in = Commands()
    monkeypatch.setattr(peers.subprocess, "run", stand_in)
    return stand_in


def test_peer_is_installed_once(tmp_path, commands):
    python = peers.python_of("some", ("a==1", "b"), folder=tmp_path)
    count = len(commands.ran)

    assert python == tmp_path / "some" / "bin" / "python"
    assert commands.ran[-1][-2:] == ["a==1", "b"]
    assert peers.python_of("some", ("a==1", "b"), folder=tmp_path) == python
    assert len(commands.ran) == count


def test_what_is_installed_alone_comes_after_the_rest(tmp_path, commands):
    peers.python_of("some", ("a==1",), alone=("b==2",), folder=tmp_path)
    first, second = commands.ran[-2:]
    count = len(commands.ran)

    assert first[-1] == "a==1"
    assert "--no-deps" not in first
    assert second[-2:] == ["--no-deps", "b==2"]
    peers.python_of("some", ("a==1",), alone=("b==2",), folder=tmp_path)
    assert len(commands.ran) == count
    peers.python_of("some", ("a==1",), alone=("b==3",), folder=tmp_path)
    assert len(commands.ran) > count


def test_peer_is_installed_again_for_other_requirements(tmp_path, commands):
    peers.python_of("some", ("a==1",), folder=tmp_path)
    peers.python_of("some", ("a==2",), folder=tmp_path)

    assert commands.ran[-1][-1] == "a==2"


def test_peer_that_cannot_be_installed_says_why_and_is_tried_again(tmp_path, commands):
    commands.failing = "a==1"
    for _ in range(2):
        with pytest.raises(peers.PeerMissingError, match="some cannot be installed: ERROR: no such version"):
            peers.python_of("some", ("a==1",), folder=tmp_path)

    assert len(commands.ran) == 4


def test_case_whose_peer_is_missing_is_skipped_with_the_reason(monkeypatch, capsys):
    def missing(*, quick):
        raise peers.PeerMissingError("paddle cannot be installed: no network")

    monkeypatch.setattr(bench_parameter_server, "CASES", {"paddle": missing})
    monkeypatch.setattr("sys.argv", ["bench", "--json"])
    bench_parameter_server.main()

    out, err = capsys.readouterr()
    assert err == "skipped paddle: paddle cannot be installed: no network\n"
    assert json.loads(out)["rows"] == []
