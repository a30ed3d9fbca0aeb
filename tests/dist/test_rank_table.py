"""Jobs started from a rank table: by the launcher on one host and on two, and by a loop in a shell."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launching import BIN, Launch, free_port, launch

pytestmark = pytest.mark.dist

BOARD = "0x0020" if platform.machine() == "aarch64" else "0x0000"

MEET = """
import os
import torch
import phalanx as px

def test_train():
    ctx = px.init()
    total = px.comm.all_reduce(torch.ones(2) * (ctx.rank + 1))
    print("rank", ctx.rank, "of", ctx.world_size, "local", ctx.role.local_rank, "node", ctx.role.node_rank,
          "device", os.environ["DEVICE_ID"], "size", os.environ["RANK_SIZE"], "sum", total[0].item(), flush=True)
    if os.environ.get("PHALANX_ATTEMPT") == "0" and "FAIL_ONCE" in os.environ and ctx.rank == 1:
        raise ValueError("rank 1 has bad data")

if __name__ == "__main__":
    test_train()
"""

LOOP = """#!/bin/bash
export RANK_TABLE_FILE=./rank_table.json
export RANK_SIZE=2
for((i=0;i<$RANK_SIZE;i++))
do
    rm -rf device$i
    mkdir device$i
    cp ./meet.py ./device$i
    cd ./device$i
    export DEVICE_ID=$i
    env > env$i.log
    {command} ./meet.py > train.log$i 2>&1 &
    cd ../
done
wait
"""


def write_table(path: Path, *places: tuple[str, int]) -> None:
    """A table of the older layout, a comma too many in it, whose rank k is `places[k]`: a server and a device."""
    instances = [
        {"devices": [{"device_id": str(device), "device_ip": "127.0.0.1"}], "rank_id": str(rank), "server_id": server}
        for rank, (server, device) in enumerate(places)
    ]
    count = str(len(places))
    group: dict[str, Any] = {"device_num": count, "server_num": str(len({server for server, _ in places}))}
    group |= {"group_name": "", "instance_count": count, "instance_list": instances}
    table = {"board_id": BOARD, "group_count": "1", "group_list": [group], "status": "completed"}
    path.write_text(json.dumps(table).replace("}]}]", "},]}]"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "meet.py").write_text(MEET)
    return tmp_path


def test_a_table_of_one_host_decides_ranks_and_devices_and_each_rank_has_a_folder(folder: Path) -> None:
    write_table(folder / "t.json", ("127.0.0.1", 5), ("127.0.0.1", 3))
    environment = {"FAIL_ONCE": "1", "MY_TOKEN": "hidden-value"}
    flags = ("--rank-table", "t.json", "--per-rank-dir", "--max-restarts", "1")
    done = launch(folder, *flags, "meet.py", environment=environment)
    assert done.code == 0, done.out + done.err
    assert "t.json: the comma before a closing bracket in line 1 is passed over" in done.out
    assert "nproc_per_node: 2 (from --rank-table)" in done.out
    assert "rank 0 of 2 local 0 node 0 device 5 size 2 sum 3.0" in done.log("rank_0/train.log")
    assert "rank 1 of 2 local 1 node 0 device 3 size 2 sum 3.0" in done.log("rank_1/train.log")
    assert "rank 1 has bad data" in done.log("attempt-0/rank_1/train.log")
    lines = done.log("rank_1/env.log").splitlines()
    assert {"DEVICE_ID=3", "RANK=1", f"RANK_TABLE_FILE={folder / 't.json'}", "MY_TOKEN=******"} <= set(lines)
    assert "hidden-value" not in "".join(lines)
    assert (folder / "log" / "rank_1" / "env.log").stat().st_mode & 0o077 == 0


def hosts(folder: Path, *tables: str) -> list[Launch]:
    port = free_port()
    flags = [("--rank-table", table, "--node-rank", str(n), "--log-dir", f"log{n}") for n, table in enumerate(tables)]
    running = [Launch((*given, "--http-port", port, "meet.py"), folder) for given in flags]
    for one in running:
        one.wait()
    for one in running:
        one.gone_within(0.5)
    return running


def test_two_hosts_of_one_table_are_one_job_whose_ranks_are_the_tables(folder: Path) -> None:
    write_table(folder / "t.json", ("127.0.0.2", 0), ("127.0.0.1", 4), ("127.0.0.2", 1))
    # The server of rank 0 comes first, whatever its address.
    first, second = hosts(folder, "t.json", "t.json")
    assert (first.code, second.code) == (0, 0), first.out + second.out + first.err + second.err
    texts = [(folder / log).read_text() for log in ("log0/workerlog.0", "log1/workerlog.1", "log0/workerlog.2")]
    assert "rank 0 of 3 local 0 node 0 device 0 size 3 sum 6.0" in texts[0]
    assert "rank 1 of 3 local 0 node 1 device 4 size 3 sum 6.0" in texts[1]
    assert "rank 2 of 3 local 1 node 0 device 1 size 3 sum 6.0" in texts[2]


def test_tables_that_differ_are_named_on_both_hosts(folder: Path) -> None:
    write_table(folder / "a.json", ("127.0.0.1", 0), ("127.0.0.2", 0))
    write_table(folder / "b.json", ("127.0.0.1", 0), ("127.0.0.2", 1))
    for one in hosts(folder, "a.json", "b.json"):
        assert one.code == 2
        assert re.search(r"--rank-table is \(sha256 \w{8}\) on .* \(node 0\) and \(sha256 \w{8}\) on", one.err)


def test_where_a_scheduler_says_what_to_start_no_table_is_needed(folder: Path) -> None:
    (folder / "who.py").write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    pod = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}
    done = launch(folder, "--rank-table", "missing.json", "who.py", environment=pod)
    assert done.code == 0, done.err
    assert "--rank-table is not read: PET_NPROC_PER_NODE=2 says what takes part" in done.out
    assert "rank 1 of 2" in done.log("workerlog.1")


@pytest.mark.parametrize("command", ["python", "pytest -s -v"])
def test_a_loop_in_a_shell_starts_the_ranks_of_the_table(folder: Path, command: str) -> None:
    # Device 0 is rank 1: the table says so, not the loop's counter.
    write_table(folder / "rank_table.json", ("127.0.0.1", 1), ("127.0.0.1", 0))
    (folder / "loop.sh").write_text(LOOP.replace("{command}", command))
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "loop.sh"], cwd=folder, env=environment, timeout=90, check=False)
    texts = [(folder / f"device{n}" / f"train.log{n}").read_text() for n in range(2)]
    assert done.returncode == 0
    assert "rank 1 of 2 local 1 node 0 device 0 size 2 sum 3.0" in texts[0], texts[0]
    assert "rank 0 of 2 local 0 node 0 device 1 size 2 sum 3.0" in texts[1], texts[1]
    assert all(("1 passed" in text) == ("pytest" in command) for text in texts)
    assert "DEVICE_ID=1" in (folder / "device1" / "env1.log").read_text()
