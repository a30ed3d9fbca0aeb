"""What a launcher takes from a rank table, and `phalanx rank-table`."""

from __future__ import annotations

import json
import logging
import platform
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from phalanx.cluster import network
from phalanx.cluster.rank_table import rank_table
from phalanx.errors import ConfigError, LaunchError
from phalanx.launch.cli import rank_table_commands
from phalanx.launch.process.environment import JobFacts, build
from phalanx.launch.request import machine, options_from_rank_table, options_from_scheduler, request
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.options import Options
from phalanx.launch.request.topology import NodeOffer, build_topology

CPU = Machine(cores=4)
EIGHT_CARDS = Machine(cores=16, gpus=tuple(map(str, range(8))), has_cuda_build=True)


def table_text(*places: tuple[str, int]) -> str:
    servers = list(dict.fromkeys(server for server, _ in places))
    listed = [
        {
            "server_id": server,
            "device": [{"device_id": d, "rank_id": r} for r, (s, d) in enumerate(places) if s == server],
        }
        for server in servers
    ]
    return json.dumps({"version": "1.0", "server_count": len(servers), "server_list": listed, "status": "completed"})


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ranks 0, 2 and 3 on 10.0.0.1 and rank 1 on 10.0.0.2; this host is the first."""
    monkeypatch.setattr(machine, "is_own_address", lambda address: address == "10.0.0.1")
    monkeypatch.setattr(network, "is_own", lambda address: address == "10.0.0.1")
    path = tmp_path / "t.json"
    path.write_text(table_text(("10.0.0.1", 4), ("10.0.0.2", 0), ("10.0.0.1", 5), ("10.0.0.1", 7)))
    return str(path)


def options(**flags: Any) -> Options:
    return Options(training_script="train.py", **flags)


def filled(environment: dict[str, str], here: Machine = CPU, **flags: Any) -> Options:
    return options_from_rank_table.fill(options_from_scheduler.fill(options(**flags), environment), environment, here)


def test_a_table_says_hosts_processes_and_cards(table: str):
    read = filled({}, EIGHT_CARDS, rank_table=table)
    assert (read.ips, read.node_rank, read.nproc_per_node, read.gpus) == ("10.0.0.1,10.0.0.2", 0, 3, "4,5,7")
    asked = request.resolve(read, EIGHT_CARDS)
    assert asked.ranks == ((0, 2, 3), (1,))
    assert asked.gpus == (("4",), ("5",), ("7",))
    assert asked.mode_flags == ("--rank-table",)
    assert dict(read.banner_items())["nproc_per_node"] == "3 (from --rank-table)"
    assert dict(read.banner_items())["ips"] == "10.0.0.1,10.0.0.2 (from --rank-table)"
    assert request.resolve(filled({}, rank_table=table), CPU).gpus == ()


def test_cards_that_are_not_there_name_the_table(table: str):
    few = Machine(cores=4, gpus=("0", "1", "2", "3"), has_cuda_build=True)
    with pytest.raises(LaunchError, match=r"--rank-table=4,5,7 asks for GPU 4, but this host offers 0, 1, 2, 3"):
        request.resolve(filled({}, few, rank_table=table), few)


def test_the_variable_says_it_too_unless_flags_or_a_launcher_do(table: str, caplog: pytest.LogCaptureFixture):
    environment = {"RANK_TABLE_FILE": table}
    assert filled(environment).origins["ips"] == "RANK_TABLE_FILE"
    assert request.resolve(filled(environment), CPU).mode_flags == ("RANK_TABLE_FILE",)
    assert filled({**environment, "PHALANX_RANK": "0"}) == options()
    with caplog.at_level(logging.INFO):
        assert filled(environment, nproc_per_node=2) == options(nproc_per_node=2)
        assert filled(environment, server_num=1, worker_num=1).table is None
    assert caplog.text.count("RANK_TABLE_FILE is left aside: the flags say what to start") == 2


def test_a_cloud_that_configures_itself_needs_no_table(caplog: pytest.LogCaptureFixture):
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.9"}
    for said in (filled(pod, rank_table="missing.json"), filled({**pod, "RANK_TABLE_FILE": "missing.json"})):
        assert (said.table, said.nnodes, said.master_addr) == (None, 2, "10.0.0.9")
    assert "--rank-table is not read: PET_NNODES=2 says what takes part" in caplog.text
    assert "RANK_TABLE_FILE is not read: PET_NNODES=2 says what takes part" in caplog.text


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ({"ips": "10.0.0.1"}, {}, "--rank-table and --ips both say what takes part"),
        ({"gpus": "0"}, {}, "--rank-table and --gpus both say"),
        ({"nproc_per_node": 2}, {}, r"--nproc-per-node 2 asks for 2 processes, but .*t.json lists 3 devices of this"),
        ({"server_num": 1, "worker_num": 2}, {}, "--rank-table starts collective training and --worker-num"),
        ({"node_rank": 1}, {}, r"--node-rank 1 is 10\.0\.0\.2, which is not an address of this host"),
    ],
)
def test_flags_that_do_not_go_with_a_table_are_told(table: str, flags: Any, environment: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        filled(environment, rank_table=table, **flags)


def test_a_launcher_within_a_loop_over_devices_is_told(table: str):
    with pytest.raises(LaunchError, match=r"RANK_TABLE_FILE and DEVICE_ID=1 are set, as in a loop .* outside the"):
        filled({"RANK_TABLE_FILE": table, "DEVICE_ID": "1"})
    other = "0x0020" if platform.machine() == "x86_64" else "0x0000"
    Path(table).write_text(rank_table.load(table).to_json("group", other))
    with pytest.raises(ConfigError, match=r"board_id .* but this machine is"):
        filled({}, rank_table=table)


def test_ranks_of_a_table_may_alternate_between_hosts(table: str):
    offers = [
        NodeOffer(node_rank=0, address="a", hostname="a", endpoints={"worker": ["a:9", "a:10", "a:8"]}, job_id="j"),
        NodeOffer(node_rank=1, address="b", hostname="b", endpoints={"worker": ["b:1"]}, job_id="k"),
    ]
    asked = request.resolve(filled({}, rank_table=table), CPU)
    layout = build_topology(offers, 0, {}, "/logs", ranks=asked.ranks, per_rank_dir=True)
    assert layout.endpoints["worker"] == ("a:9", "b:1", "a:10", "a:8")
    assert [(p.rank, p.local_rank, p.log_file, p.env_file) for p in layout.local] == [
        (rank, local, f"/logs/rank_{rank}/train.log", f"/logs/rank_{rank}/env.log")
        for local, rank in enumerate((0, 2, 3))
    ]
    facts = JobFacts(
        mode="collective", log_dir="/logs", attempt=0, max_restarts=0, timeout_s=1.0, gloo_path="", interface=None,
        is_multi_host=True, rank_table="/t.json", device_ids=(4, 5, 7),
    )  # fmt: skip
    variables = build(layout.local[2], layout, facts, {})
    assert [variables[name] for name in ("RANK", "DEVICE_ID", "RANK_SIZE", "RANK_TABLE_FILE")] == [
        "3", "7", "4", "/t.json",
    ]  # fmt: skip


def run(*arguments: str) -> Result:
    return CliRunner().invoke(rank_table_commands.command, list(arguments))


def test_a_table_is_made_checked_and_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hccn = tmp_path / "hccn.conf"
    hccn.write_text("address_0=192.1.27.6\nnetmask_0=255.255.255.0\naddress_1=192.2.27.6\n")
    monkeypatch.setattr(rank_table_commands, "HCCN", hccn)
    made = tmp_path / "made.json"
    assert run("make", "--hosts", "127.0.0.1,10.255.0.2", "--out", str(made)).exit_code == 0
    devices = rank_table.load(str(made)).devices
    assert [(d.rank, d.server, d.device_id, d.device_ip) for d in devices] == [
        (0, "127.0.0.1", 0, "192.1.27.6"), (1, "127.0.0.1", 1, "192.2.27.6"),
        (2, "10.255.0.2", 0, "10.255.0.2"), (3, "10.255.0.2", 1, "10.255.0.2"),
    ]  # fmt: skip
    older, newer = tmp_path / "older.json", tmp_path / "newer.json"
    assert run("convert", str(made), "--out", str(older)).exit_code == 0
    assert json.loads(older.read_text())["group_list"][0]["device_num"] == "4"
    newer.write_text(run("convert", str(older)).stdout)
    assert rank_table.load(str(newer)).devices == devices
    said = run("check", str(made)).stdout
    assert "rank 1  127.0.0.1  device 1  192.2.27.6" in said
    assert "ranks: 4, servers: 2, this host: 127.0.0.1" in said
    facts = json.loads(run("check", str(older), "--json").stdout)
    assert (facts["layout"], facts["meeting"], len(facts["devices"])) == ("group", "127.0.0.1:29500", 4)


def test_commands_say_what_is_wrong(tmp_path: Path):
    broken = tmp_path / "broken.json"
    broken.write_text(table_text(("127.0.0.1", 0)).replace('"completed"', '"completed",').replace('id": 0', 'id": 1'))
    result = run("check", str(broken))
    assert isinstance(result.exception, ConfigError)
    assert "the comma before a closing bracket in line 1 is passed over" not in result.stdout
    with pytest.raises(LaunchError, match="--hosts ' , ' lists no host"):
        CliRunner().invoke(rank_table_commands.command, ["make", "--hosts", " , "], catch_exceptions=False)
    with pytest.raises(LaunchError, match=r"--hosts 127\.0\.0\.1,127\.0\.0\.1 lists 127\.0\.0\.1 twice"):
        CliRunner().invoke(
            rank_table_commands.command, ["make", "--hosts", "127.0.0.1,127.0.0.1"], catch_exceptions=False
        )
