"""Figures of a machine for a number of ranks that was not measured."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from phalanx.cluster.calibration.figures import Grid, Measured, Rates, measured_file
from phalanx.cluster.calibration.interpolation import cores_each, with_ranks
from phalanx.cluster.role.role import Role
from phalanx.cluster.spec.cluster import read_cluster
from phalanx.errors import ConfigError
from phalanx.train.job_cluster import cluster_of

LINE = (64.0, 65536.0)
HOST = {"launch_s": 2e-6, "backward_launch_s": 3e-6, "checkpoint_s": 1e-4, "selective_op_s": 1e-5}
ALONE = ("elementwise forward", "matmul fp32", "matmul bf16")
TOGETHER = ("all_reduce shm", "send shm", "layer all_gather", "waiting", "sharded kept", "placed parameter")


def a_grid(first: float, last: float, dims: int = 1) -> Grid:
    seconds = (first, *[last] * (2**dims - 1))
    return Grid(axes=(LINE,) * dims, seconds=seconds, powers=(1.0,) * dims)


def rates(threads: int, *groups: int) -> Rates:
    grids = {name: a_grid(1e-6, 9e-6, 3 if "matmul" in name else 1) for name in ALONE}
    for group in groups:
        grids |= {f"{name} {group}": a_grid(group * 1e-5, group * 1e-4) for name in TOGETHER}
    return Rates(threads=threads, **HOST, grids=grids, shared={"shm": 0.5})


def machine(cores: int, **measured: Rates) -> Measured:
    by_ranks = {int(name.removeprefix("of_")): one for name, one in measured.items()}
    return Measured(host="h", processor="p", cores=cores, memory=2**30, torch="2", date="2026", rates=by_ranks)


@pytest.mark.parametrize(("cores", "ranks", "each"), [(8, 1, 8), (8, 3, 2), (2, 2, 1), (2, 4, 0.5), (2, 3, 2 / 3)])
def test_ranks_have_whole_cores_or_share_one(cores: int, ranks: int, each: float) -> None:
    assert cores_each(cores, ranks) == pytest.approx(each)


def test_ranks_that_share_cores_take_as_much_longer() -> None:
    found, near = with_ranks(machine(2, of_1=rates(2), of_2=rates(1, 2)), 4)
    four, two = found.at(4), found.at(2)
    assert near == 2
    assert found.ranks == (1, 2, 4)
    assert (four.threads, four.shared) == (1, two.shared)
    assert four.launch_s == pytest.approx(2 * two.launch_s)
    assert four.matmul_s(64, 64, 64) == pytest.approx(2 * two.matmul_s(64, 64, 64))
    assert four.operator_s("elementwise", 65536) == pytest.approx(2 * two.operator_s("elementwise", 65536))


def test_what_a_rank_exchanges_grows_with_its_group() -> None:
    four = with_ranks(machine(2, of_2=rates(1, 2)), 4)[0].at(4)
    assert four.collective_s("all_reduce", 64, 2) == pytest.approx(2 * 2e-5), "only what the cores cost"
    assert four.collective_s("all_reduce", 64, 4) == pytest.approx(2 * 2e-5 * 1.5)
    assert four.layer_s("all_gather", 65536, 4) == pytest.approx(2 * 2e-4 * 1.5)
    assert four.collective_s("send", 64, 4) == pytest.approx(2 * 2e-5)
    assert four.waiting_s(64, 4) == pytest.approx(2 * 2e-5)
    six = with_ranks(machine(12, of_4=rates(3, 2, 4)), 6)[0].at(6)
    groups = {int(name.rpartition(" ")[2]) for name in six.grids if name.startswith("all_reduce")}
    assert groups == {2, 3, 6}


def test_fewer_threads_slow_what_they_share_and_not_the_start_of_an_operator() -> None:
    found, near = with_ranks(machine(8, of_1=rates(8), of_2=rates(4, 2)), 8)
    eight = found.at(8)
    assert near == 2
    assert eight.threads == 1
    assert eight.launch_s == HOST["launch_s"]
    assert eight.operator_s("elementwise", 64) == pytest.approx(1e-6)
    assert eight.operator_s("elementwise", 65536) == pytest.approx(1e-6 + 4 * 8e-6)


def test_of_two_numbers_as_near_the_larger_is_taken() -> None:
    assert with_ranks(machine(4, of_1=rates(4), of_4=rates(1, 2, 4)), 2)[1] == 4
    assert with_ranks(machine(4, of_2=rates(2, 2), of_8=rates(1, 2, 4, 8)), 4)[1] == 8


def test_what_several_ranks_exchange_is_not_known_from_one() -> None:
    with pytest.raises(
        ConfigError, match=r"Asked for 2 ranks of h, which was measured with 1\. Run `phalanx calibrate"
    ):
        with_ranks(machine(2, of_1=rates(2)), 2)


def test_a_job_of_other_ranks_than_were_measured_is_reckoned_from_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cores = len(os.sched_getaffinity(0))
    machine(cores, of_1=rates(cores), of_2=rates(max(1, cores // 2), 2)).save(measured_file())
    with caplog.at_level(logging.INFO, "phalanx.train"):
        found = cluster_of(Role(world_size=64, local_world_size=64), torch.device("cpu"))
    assert (
        "the figures for 64 ranks are estimated from those for 2: `phalanx calibrate -n 64` measures them"
        in caplog.text
    )
    assert found.devices == 64
    assert found.measured is not None
    slower = cores_each(cores, 2) / cores_each(cores, 64)
    two = read_cluster("herex2").nodes[0].device
    assert found.nodes[0].device.flops["fp32"] < two.flops["fp32"]
    assert found.measured.at(64).operator_s("elementwise", 65536) <= slower * 9e-6 * (1 + 1e-9)
    with pytest.raises(ConfigError, match="which was measured with 1, 2"):
        read_cluster("herex64")
