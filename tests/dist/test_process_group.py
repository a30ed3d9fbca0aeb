"""Groups form from every kind of environment, and what goes wrong is said on every rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx as px
from phalanx.comm import agreement
from phalanx.comm.shared_memory import region
from ranks import FLEET_ONLY, run_ranks

pytestmark = pytest.mark.dist


def _sum_of_ranks() -> tuple[int, int, float]:
    context = px.init()
    x = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(x)
    return context.rank, context.world_size, x.item()


def test_two_ranks_meet_in_the_launchers_store():
    assert run_ranks(_sum_of_ranks, 2) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_one_rank_needs_no_group():
    assert run_ranks(_one_rank, 1) == [False]


def _one_rank() -> bool:
    px.init()
    return dist.is_initialized()


def test_each_rank_logs_its_group():
    outcomes = run_ranks(_sum_of_ranks, 2, expect_failure=True)
    for rank, outcome in enumerate(outcomes):
        assert f"init shm context nranks: 2 local rank: {rank} gpu id: -1 ring id: 0" in outcome.output


def test_fleets_variables_alone_form_a_group_by_files(tmp_path: Path):
    env = FLEET_ONLY | {"PADDLE_GLOO_RENDEZVOUS": "2", "PADDLE_GLOO_FS_PATH": str(tmp_path / "gloo")}
    assert run_ranks(_sum_of_ranks, 2, env=env) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_store_file_left_by_a_killed_run_is_an_error_on_every_rank(tmp_path: Path):
    env = FLEET_ONLY | {"PADDLE_GLOO_RENDEZVOUS": "2", "PADDLE_GLOO_FS_PATH": str(tmp_path)}
    killed = run_ranks(_init_and_die, 2, env=env, expect_failure=True)
    assert all(o.failed for o in killed)  # the slower one may see the other go before it dies itself
    for outcome in run_ranks(_sum_of_ranks, 2, env=env, expect_failure=True):
        assert outcome.error_type == "ConfigError"
        assert "Two processes say they are rank" in outcome.message


def _init_and_die() -> None:
    px.init()
    os._exit(9)


def test_rank_0_holds_the_store_at_the_http_endpoint(unused_port: int):
    env = FLEET_ONLY | {
        "PADDLE_GLOO_RENDEZVOUS": "3",
        "PADDLE_GLOO_HTTP_ENDPOINT": f"127.0.0.1:{unused_port}",
    }
    assert run_ranks(_sum_of_ranks, 2, env=env) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_rank_0_holds_the_store_when_no_launcher_does(unused_port: int):
    env = FLEET_ONLY | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    ranks = run_ranks(_sum_of_ranks, 2, env=env, env_of_rank=lambda r: {"RANK": str(r), "WORLD_SIZE": "2"})
    assert ranks == [(0, 2, 3.0), (1, 2, 3.0)]


def test_rank_0_may_end_as_soon_as_it_is_in_the_group(unused_port: int):
    """It holds the store, from which a slower rank still reads."""
    env = FLEET_ONLY | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    assert run_ranks(_init_slowly_on_rank_1, 2, env=env, env_of_rank=lambda r: {"RANK": str(r), "WORLD_SIZE": "2"})


def _init_slowly_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        await_key = region.await_key

        def await_late(store: Any, key: str) -> str:
            time.sleep(0.3 if key.startswith("joined/") else 0.0)
            return await_key(store, key)

        region.await_key = await_late
    px.init()


def test_ranks_started_by_hand_do_not_all_use_every_core(unused_port: int) -> None:
    """RANK and WORLD_SIZE say nothing of the host; the ranks learn of each other when they meet."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    env = FLEET_ONLY | master | {"OMP_NUM_THREADS": None}
    by_hand = {"env": env, "env_of_rank": lambda r: {"RANK": str(r), "WORLD_SIZE": "2"}}
    assert run_ranks(_threads, 2, **by_hand) == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2


def _threads() -> int:
    torch.get_num_threads = lambda: len(os.sched_getaffinity(0))  # other ranks of this suite compute with one
    chosen = [torch.get_num_threads()]
    torch.set_num_threads = chosen.append
    px.init()
    return chosen[-1]


def test_a_rank_that_never_comes_is_named_by_those_that_came():
    came, absent = run_ranks(_init_unless_rank_1, 2, expect_failure=True, env={"PHALANX_RENDEZVOUS_TIMEOUT_S": "4"})
    assert came.error_type == "PeerLostError"
    assert "Waited 4 s for 2 ranks; 1 did not come: rank 1 (" in came.message
    assert "nothing listens on port 20001, log " in came.message
    assert "workerlog.1" in came.message
    assert "server not ready, wait 3 sec to retry..." in came.output
    assert "not ready endpoints:['127.0.0.1:20001']" in came.output
    assert not absent.failed


def _init_unless_rank_1() -> None:
    if os.environ["RANK"] != "1":
        px.init()


def test_a_store_that_is_not_there_is_named(unused_port: int):
    env = {
        "PHALANX_RENDEZVOUS_TIMEOUT_S": "1",
        "PHALANX_MASTER_PORT": str(unused_port),
        "MASTER_PORT": str(unused_port),
    }
    for outcome in run_ranks(_sum_of_ranks, 2, expect_failure=True, env=env):
        assert outcome.error_type == "PeerLostError"
        assert f"127.0.0.1:{unused_port} refuses connections for 1 s" in outcome.message


def test_two_processes_with_one_rank_fail_alike():
    outcomes = run_ranks(
        _sum_of_ranks, 3, expect_failure=True,
        env_of_rank=lambda r: {k: "1" for k in ("PHALANX_RANK", "RANK", "PADDLE_TRAINER_ID")} if r == 2 else {},
    )  # fmt: skip
    assert [o.error_type for o in outcomes] == ["ConfigError"] * 3
    assert len({o.message for o in outcomes}) == 1
    assert "Two processes say they are rank 1" in outcomes[0].message


def test_world_sizes_that_disagree_are_an_error_before_any_meeting():
    outcomes = run_ranks(_sum_of_ranks, 2, expect_failure=True, env={"WORLD_SIZE": "3"})
    for outcome in outcomes:
        assert outcome.error_type == "RoleError"
        assert "PHALANX_WORLD_SIZE=2 and WORLD_SIZE=3 disagree" in outcome.message


def test_a_group_of_the_script_is_used_and_left_alone():
    assert run_ranks(_own_group, 2) == [True, True]


def _own_group() -> bool:
    dist.init_process_group("gloo", init_method="env://")
    context = px.init()
    agreement.agree("nothing", 1)
    px.shutdown()
    return dist.is_initialized() and not context.owns_group


def test_a_group_of_the_script_that_contradicts_the_role_is_an_error():
    for outcome in run_ranks(_reversed_group, 2, expect_failure=True):
        assert outcome.error_type == "ConfigError"
        assert "Remove the script's init_process_group" in outcome.message


def _reversed_group() -> None:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=1 - int(os.environ["RANK"]), world_size=2)
    px.init()


def test_init_shutdown_and_init_again_works_without_warnings():
    assert run_ranks(_twice, 2) == [2.0, 2.0]


def _twice() -> float:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            px.init()
            x = torch.ones(1)
            dist.all_reduce(x)
            px.shutdown()
    assert not caught
    assert not dist.is_initialized()
    return x.item()


def test_reading_a_role_does_not_import_torch():
    code = "import sys; from phalanx.cluster import Role; Role.detect(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_port_held_by_someone_else_is_named(unused_port: int):
    env = FLEET_ONLY | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("::", unused_port))
        other.listen()
        first, _ = run_ranks(
            _init_if_rank_0, 2, env=env, expect_failure=True, env_of_rank=lambda r: {"RANK": str(r), "WORLD_SIZE": "2"}
        )
    assert first.error_type == "ConfigError"
    assert (
        f"Rank 0 was to hold the job's store at 127.0.0.1:{unused_port}, but could not: the port is in use by pid "
        in first.message
    )


def _init_if_rank_0() -> None:
    if os.environ["RANK"] == "0":
        px.init()
