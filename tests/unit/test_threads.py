"""Ranks that no launcher of ours started divide the cores of their host."""

from __future__ import annotations

import os

import pytest
import torch

from phalanx.cluster.role.role import Launcher, Role
from phalanx.comm.threads import share_cores


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Eight cores, as many threads, and the numbers of threads that are set."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    return numbers


def rank(launcher: Launcher, local_world_size: int) -> Role:
    return Role(world_size=64, local_world_size=local_world_size, launcher=launcher)


@pytest.mark.parametrize(("ranks", "threads"), [(2, [4]), (3, [2]), (16, [1]), (1, [])])
def test_each_rank_of_a_host_gets_its_share(chosen: list[int], ranks: int, threads: list[int]) -> None:
    share_cores(rank("rank table", ranks))
    assert chosen == threads


def test_what_the_user_chose_stays(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    share_cores(rank("torchrun", 2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    share_cores(rank("torchrun", 2))
    assert chosen == []


def test_a_rank_bound_to_cores_of_its_own_keeps_them(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    share_cores(rank("mpi", 2))
    assert chosen == []
