"""Ranges of -n and --nnodes: what they mean, and what cannot work is said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.errors import LaunchError
from phalanx.launch.cli import flags
from phalanx.launch.cli.flag_types import CountOrRange
from phalanx.launch.request import request
from phalanx.launch.request.elastic import ElasticRange, WorkerRange
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.options import Options

CPU = Machine(cores=4)
TWO_CARDS = Machine(cores=16, gpus=("0", "1"), has_cuda_build=True)


def resolve(machine: Machine = CPU, **values: Any) -> request.LaunchRequest:
    return request.resolve(Options(training_script="train.py", **values), machine)


def test_a_job_without_a_range_is_not_elastic() -> None:
    assert resolve(nproc_per_node=2).elastic is None


def test_a_range_begins_with_its_end_or_with_as_many_as_there_are_cards() -> None:
    assert resolve(least_nproc=1, nproc_per_node=4).elastic == ElasticRange(least_ranks=1, most_ranks=4)
    on_cards = resolve(TWO_CARDS, least_nproc=1, nproc_per_node=4)
    assert (on_cards.counts["worker"], on_cards.elastic) == (2, ElasticRange(least_ranks=1, most_ranks=2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"least_nproc": 1, "nproc_per_node": 4, "replicas": 2}, "--replicas 2 gives only 2 something to do"),
        ({"least_nproc": 1, "nproc_per_node": 4, "rank_table": "t.json"}, "Drop one of the two"),
        ({"least_nproc": 1, "nproc_per_node": 4, "server_num": 1}, "--nproc-per-node"),
    ],
)
def test_what_does_not_go_with_a_range_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        resolve(**values)


def test_a_range_of_workers_begins_with_its_end() -> None:
    asked = resolve(server_num=1, least_workers=1, worker_num=4)
    assert (asked.counts["worker"], asked.workers, asked.elastic) == (4, WorkerRange(least=1, most=4), None)
    assert resolve(server_num=1, worker_num=4).workers is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"servers": "127.0.0.1:1", "workers": "127.0.0.1:2,127.0.0.1:3"},
            "--servers and --workers list every process",
        ),
        ({"server_num": 1, "heter_worker_num": 1}, "which heter workers cannot follow"),
    ],
)
def test_what_does_not_go_with_a_range_of_workers_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=rf"--worker-num 1:2 .*{message}"):
        resolve(least_workers=1, worker_num=2, **values)


def test_fewer_cards_than_the_least_number_are_refused() -> None:
    with pytest.raises(LaunchError, match="-n 3:4 asks for 3 processes, but there are 2 GPUs"):
        resolve(TWO_CARDS, least_nproc=3, nproc_per_node=4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("4:1", "'4:1' is no range: it ends before it starts. Write 1:4."),
        ("0:4", "'0' is no number of processes. Give a whole number, at least 1, or a range as 1:4."),
        ("1:", "'' is no number of processes"),
        ("1:2:3", "'2:3' is no number of processes"),
    ],
)
def test_a_range_is_checked_where_it_is_typed(value: str, message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(flags.command, ["-n", value, str(tmp_path / "train.py")])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_range_of_one_number_is_that_number() -> None:
    assert CountOrRange("number").convert("3:3", None, None) == 3
    assert CountOrRange("number").convert("1:3", None, None) == range(1, 4)
