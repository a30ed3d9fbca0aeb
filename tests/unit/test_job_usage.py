"""What processes of a node used: the file it is kept in, read piece by piece, and what nvidia-smi says."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.jobs import paths
from phalanx.jobs.attempt import usage
from phalanx.jobs.attempt.usage import Sample, Usage
from phalanx.jobs.node.usage_monitor import gpus_in_use


def _append(folder: Path, *numbers: int) -> None:
    for number in numbers:
        usage.append(folder, 0, Sample(number, 5.0 * number, 1.5, 100, 200))


def _numbers(read: Usage) -> list[int]:
    return [sample.number for sample in read.samples]


def test_samples_are_read_whole_and_once(tmp_path: Path) -> None:
    _append(tmp_path, 0, 1)
    with paths.usage(tmp_path, 0).open("a") as file:
        file.write('{"number": 2, "ti')
    first = usage.read(tmp_path, 0)
    assert first.samples[1] == Sample(1, 5.0, 1.5, 100, 200)
    assert (_numbers(first), first.offset) == ([0, 1], 2)
    with paths.usage(tmp_path, 0).open("a") as file:
        file.write('me": 10, "cpu": 0, "memory": 7, "peak": 200, "gpu": 0.5, "gpu_memory": 9}\n')
    assert usage.read(tmp_path, 0, first.offset) == Usage(0, [Sample(2, 10.0, 0.0, 7, 200, 0.5, 9)], 3)
    assert usage.read(tmp_path, 0, 3) == Usage(0, [], 3)
    assert _numbers(usage.read(tmp_path, 0, -1)) == [2]
    assert _numbers(usage.read(tmp_path, 0, -2)) == [1, 2]


def test_a_node_that_left_no_file_used_nothing_that_is_known(tmp_path: Path) -> None:
    assert usage.read(tmp_path, 3) == Usage(3, [], 0)
    assert usage.read(tmp_path, 3, -1) == Usage(3, [], 0)


@pytest.mark.parametrize(
    "line",
    ["noise", "[1]", "{}", '{"number": 1, "time": NaN, "cpu": 0, "memory": 0, "peak": 0}', '{"number": -1}', "\udc80"],
)
def test_what_a_job_writes_there_itself_is_passed_over(tmp_path: Path, line: str) -> None:
    _append(tmp_path, 0)
    with paths.usage(tmp_path, 0).open("a", errors="surrogateescape") as file:
        file.write(f"{line}\n")
    _append(tmp_path, 2)
    assert _numbers(usage.read(tmp_path, 0)) == [0, 2]


def test_a_long_file_is_thinned_out_and_read_on_by_the_same_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "LIMIT", 1000)
    _append(tmp_path, *range(5))
    before = usage.read(tmp_path, 0)
    _append(tmp_path, *range(5, 200))
    file = paths.usage(tmp_path, 0)
    assert file.stat().st_size <= 1000
    assert list(tmp_path.iterdir()) == [file]
    left = usage.read(tmp_path, 0, before.offset)
    assert left.offset == 200
    gaps = [later - earlier for earlier, later in zip(_numbers(left), _numbers(left)[1:], strict=False)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] <= 2 < gaps[0]
    assert _numbers(usage.read(tmp_path, 0, 199)) == [199]


def test_cards_are_those_of_our_processes() -> None:
    on_cards = "71, GPU-a, 1024\n72, GPU-a, 512\n73, GPU-b, 2048\n99, GPU-c, 4096\n"
    cards = "GPU-a, 100\nGPU-b, 50\nGPU-c, 90\n"
    assert gpus_in_use([71, 72, 73], on_cards, cards) == (1.5, (1024 + 512 + 2048) << 20)
    assert gpus_in_use([5], on_cards, cards) == (None, None)
    assert gpus_in_use([5], "", cards) == (None, None)


def test_what_the_driver_does_not_know_counts_nothing() -> None:
    assert gpus_in_use([71], "71, GPU-a, [N/A]\n", "GPU-a, [N/A]\n") == (0.0, 0)
