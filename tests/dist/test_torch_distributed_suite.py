"""Torch's own tests of collectives and DDP pass over shared memory.

They ship in torch's package (`DistributedTest` of torch/testing/_internal/distributed/distributed_test.py), where each
starts ranks of its own. Here the ranks of one launch run all that need no card, one after the other, in one group.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import unittest
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

import phalanx as px
from ranks import run_ranks

pytestmark = pytest.mark.dist

RANKS = 3

FOR_OTHER_DEVICES = ("cuda", "nccl", "gpu")
"""Words in the names of tests that need cards."""

NOT_APPLICABLE = {
    "test_SyncBatchNorm_process_group": "a model of torchvision",
    "test_barrier_timeout_global": "ends the default group and makes one of gloo",
    "test_batch_isend_irecv_mixed_backend_err": "makes a group of NCCL",
    "test_batch_isend_irecv_op_err": "cards",
    "test_get_backend": "the backend's name is gloo",
    "test_new_subgroups_with_group_param": "needs 4 ranks",
} | dict.fromkeys(
    (
        "test_monitored_barrier_allreduce_hang",
        "test_monitored_barrier_allreduce_hang_wait_all_ranks",
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    ),
    "torch.distributed.monitored_barrier refuses all backends but gloo by name",
)


def load_suite() -> tuple[Any, type]:
    """Import torch's tests as those of a backend that may do what gloo may, on any number of ranks."""
    folder = Path(os.environ["PHALANX_LOG_DIR"])
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(exist_ok=True)
    os.environ |= {"BACKEND": "gloo", "TEMP_DIR": str(folder)}
    if (
        importlib.util.find_spec("expecttest") is None
    ):  # torch's test cases derive from its, and these use nothing of it
        sys.modules["expecttest"] = ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    os.environ["BACKEND"] = "mpi"  # the one of which torch does not ask for 8 ranks where 3 will do
    return DistributedTest._DistTestBase, TestCase


def run_suite() -> list[str]:
    rank = px.init().rank
    tests, case = load_suite()

    class Suite(tests, case):  # type: ignore[misc, valid-type]
        world_size = property(lambda _: os.environ["WORLD_SIZE"])

        def _barrier(self, *_: object, **__: object) -> None:
            dist.barrier()

    passed = []
    for name in sorted(name for name in dir(Suite) if name.startswith("test_")):
        if name in NOT_APPLICABLE or any(w in name.lower() for w in FOR_OTHER_DEVICES):
            continue
        test = Suite(name)
        test.rank, test.file_name = rank, f"{os.environ['TEMP_DIR']}/{name}"
        print(name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's tests call much that torch warns about
                getattr(test, name)()
        except (unittest.SkipTest, SystemExit):  # torch leaves a rank with an exit code that says why
            continue
        passed.append(name)
        dist.barrier()  # a test that some ranks skip or end early would otherwise meet the next one of the others
    return passed


def test_torchs_own_tests_pass() -> None:
    everyone = run_ranks(run_suite, RANKS, timeout_s=150, env={"PHALANX_BACKEND": "shm"})
    assert everyone[1:] == everyone[:-1]
    assert len(everyone[0]) >= 95
    assert {"test_all_reduce_sum", "test_barrier_timeout_full_group", "test_DistributedDataParallelCPU"} <= {
        *everyone[0]
    }
