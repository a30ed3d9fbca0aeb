"""Rank tables of both layouts are read alike, and every mistake has a message of its own."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster import network
from phalanx.cluster.rank_table import rank_table
from phalanx.cluster.role import rank_table_role
from phalanx.cluster.role.role import Role
from phalanx.cluster.spec import files
from phalanx.errors import ConfigError, RoleError

BOARD = "0x0020" if platform.machine() == "aarch64" else "0x0000"


def instance(rank: int, server: str, device: int) -> dict[str, Any]:
    devices = [{"device_id": str(device), "device_ip": f"192.1.27.{device}"}]
    return {"devices": devices, "rank_id": str(rank), "server_id": server}


def groups() -> dict[str, Any]:
    """Four ranks on two servers, in the older layout."""
    instances = [instance(rank, f"10.0.0.{rank // 2 + 1}", rank % 2) for rank in range(4)]
    group = {"device_num": "4", "server_num": "2", "group_name": "", "instance_count": "4", "instance_list": instances}
    return {
        "board_id": BOARD, "chip_info": "910", "deploy_mode": "lab", "group_count": "1", "group_list": [group],
        "para_plane_nic_location": "device", "para_plane_nic_name": ["eth0", "eth1"], "para_plane_nic_num": "2",
        "status": "completed",
    }  # fmt: skip


def servers() -> dict[str, Any]:
    """The same in the newer layout."""

    def devices(first: int) -> list[dict[str, str]]:
        return [{"device_id": str(n), "device_ip": f"192.1.27.{n}", "rank_id": str(first + n)} for n in range(2)]

    listed = [{"server_id": f"10.0.0.{n + 1}", "device": devices(2 * n)} for n in range(2)]
    return {"version": "1.0", "server_count": "2", "server_list": listed, "status": "completed"}


def test_both_layouts_say_the_same_and_turn_into_each_other():
    old, new = (rank_table.parse(json.dumps(table), "t.json") for table in (groups(), servers()))
    assert old.devices == new.devices
    assert old.digest == new.digest
    assert [(d.rank, d.server, d.device_id) for d in old.devices][2:] == [(2, "10.0.0.2", 0), (3, "10.0.0.2", 1)]
    assert (old.layout, old.board_id, new.layout) == ("group", BOARD, "server")
    assert rank_table.parse(old.to_json("server"), "n").devices == old.devices
    assert rank_table.parse(new.to_json("group", BOARD), "o").devices == old.devices


def test_numbers_may_be_numbers_and_servers_follow_their_lowest_rank():
    table = servers()
    table["server_count"] = 2
    for rank, (server, place) in enumerate([(1, 0), (0, 0), (1, 1), (0, 1)]):
        table["server_list"][server]["device"][place]["rank_id"] = rank
    read = rank_table.parse(json.dumps(table), "t.json")
    assert read.servers == ("10.0.0.2", "10.0.0.1")
    assert [device.rank for device in read.on("10.0.0.1")] == [1, 3]


def test_a_trailing_comma_is_passed_over_with_a_notice_and_text_is_left_alone():
    text = json.dumps(groups(), indent=1).replace('"eth1"\n', '"eth1,]",\n').replace('"lab"', '"a,}"')
    read = rank_table.parse(text, "t.json")
    line = text[: text.index('"eth1,]"')].count("\n") + 1
    assert read.notices == (f"t.json: the comma before a closing bracket in line {line} is passed over",)
    assert rank_table.parse(json.dumps(groups()), "t.json").notices == ()


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ([0], None),
        ([4, 5, 6, 7], None),
        (list(range(8)), None),
        (list(range(16)), None),
        ([0, 1, 2], "10.0.0.1 has 3 devices, where collectives of other frameworks want 1, 2, 4 or 8; it works here."),
        (list(range(12)), "10.0.0.1 has 12 devices"),
        ([3, 4], "10.0.0.1 has devices 3, 4, of both fours 0-3 and 4-7; it works here. Where only"),
    ],
)
def test_numbers_of_devices_that_are_unusual_are_told(devices: list[int], told: str | None):
    listed = [{"device_id": str(n), "device_ip": "", "rank_id": str(rank)} for rank, n in enumerate(devices)]
    table = {"version": "1.0", "server_count": "1", "server_list": [{"server_id": "10.0.0.1", "device": listed}]}
    notices = rank_table.parse(json.dumps({**table, "status": "completed"}), "t.json").notices
    assert len(notices) == (told is not None)
    assert told is None or told in notices[0]


def test_a_planner_that_is_given_such_a_table_says_it_too(tmp_path: Path):
    file = tmp_path / "three.json"
    listed = [{"device_id": str(n), "device_ip": "", "rank_id": str(n)} for n in range(3)]
    table = {"version": "1.0", "server_count": "1", "server_list": [{"server_id": "10.0.0.1", "device": listed}]}
    file.write_text(json.dumps({**table, "status": "completed"}))
    cluster = files.read(file, "h100")
    assert cluster.nodes[0].devices == 3
    assert any("has 3 devices" in said for said in cluster.assumed)


def at(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(table: Any) -> None:
        for step in path[:-1]:
            table = table[step]
        table[path[-1]] = to

    return change


def without(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(table: Any) -> None:
        for step in path[:-1]:
            table = table[step]
        del table[path[-1]]

    return change


GROUP = ("group_list", 0)
SECOND = (*GROUP, "instance_list", 1)

BROKEN = [
    (at(*GROUP, "device_num", to="8"), r"group_list\[0\]\.device_num is 8, but the table lists 4 devices"),
    (at(*GROUP, "instance_count", to="3"), r"group_list\[0\]\.instance_count is 3, but the table lists 4 instances"),
    (at(*GROUP, "server_num", to="1"), r"server_num is 1, but the table lists 2 servers"),
    (at("group_count", to="2"), r"group_count is 2, but the table lists 1 groups"),
    (at("para_plane_nic_num", to="8"), r"para_plane_nic_num is 8, but the table lists 2 interfaces"),
    (at("para_plane_nic_name", to=["eth0"]), r"para_plane_nic_num is 2, but the table lists 1 interfaces"),
    (at(*SECOND, "rank_id", to="7"), r"4 devices need rank_id 0 to 3, but 1 is missing and 7 is given"),
    (at(*SECOND, "rank_id", to="0"), r"rank_id 0 is given twice, to device 0 of 10.0.0.1 and device 1 of 10.0.0.1"),
    (at(*SECOND, "devices", 0, "device_id", to="0"), r"device 0 of 10.0.0.1 is listed twice, for ranks 0 and 1"),
    (at(*SECOND, "devices", 0, "device_id", to="x"), r"devices\[0\]\.device_id must be a whole number .* found 'x'"),
    (at(*SECOND, "devices", 0, "device_ip", to="nic"), r"device_ip must be an IP address, found 'nic'"),
    (at(*SECOND, "devices", to=[]), r"\(rank_id 1\) has 0 devices, and a process runs on one"),
    (at("board_id", to="0x0021"), r"board_id must be 0x0000 \(x86\) or 0x0020 \(arm\), found '0x0021'"),
    (at(*SECOND, "server_id", to="10.*.*.*"), r"server_id must be the server's IPv4 address, found '10\.\*"),
    (at("status", to="initializing"), r"status must be 'completed', found 'initializing'"),
    (without(*SECOND, "server_id"), r"instance_list\[1\] has no 'server_id', only devices, rank_id"),
    (without("group_list"), r"the table has no 'group_list', only board_id, "),
    (at("group_list", to=7), r"group_list must be a list in brackets, found 7"),
    (at(*SECOND, to="x"), r"instance_list\[1\] must be an object in braces, found 'x'"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_every_mistake_in_the_older_layout_is_told(change: Any, message: str):
    table = groups()
    change(table)
    with pytest.raises(ConfigError, match=f"t.json: .*{message}"):
        rank_table.parse(json.dumps(table), "t.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at("server_count", to="3"), "server_count is 3, but the table lists 2 servers"),
        (at("version", to="2.0"), "version must be 1.0, the version read here, found '2.0'"),
        (at("server_list", 1, "server_id", to="10.0.0.1"), "10.0.0.1 is listed twice. List each server once"),
        (at("server_list", 1, "device", 0, "rank_id", to="-1"), "rank_id must be a whole number of at least 0"),
        (at("server_list", 1, "server_id", to="fe80::1"), "must be the server's IPv4 address"),
        (without("status"), "the table has no 'status'"),
        (lambda table: table.update(server_count="0", server_list=[]), "the table lists no device"),
        (lambda table: (table.clear(), table.update(ranks=[])), "is in no layout known here"),
    ],
)
def test_every_mistake_in_the_newer_layout_is_told(change: Any, message: str):
    table = servers()
    change(table)
    with pytest.raises(ConfigError, match=f"t.json: .*{message}"):
        rank_table.parse(json.dumps(table), "t.json")


def test_no_json_is_told_with_line_and_column_and_a_table_of_another_machine_by_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"t.json: no JSON at line 2, column 3 .*Correct it there"):
        rank_table.parse("{\n  board_id: 3}", "t.json")
    with pytest.raises(ConfigError, match=r"nothing.json cannot be read .*phalanx rank-table make --hosts"):
        rank_table.load(str(tmp_path / "nothing.json"))
    table = rank_table.parse(json.dumps(groups() | {"board_id": "0x0020"}), "t.json")
    table.check_machine("aarch64")
    with pytest.raises(ConfigError, match=r"board_id 0x0020 says arm, but this machine is x86_64. Write 0x0000 if"):
        table.check_machine("x86_64")
    with pytest.raises(ConfigError, match=r"but this machine is riscv64. Use a table of version 1.0"):
        table.check_machine("riscv64")
    rank_table.parse(json.dumps(servers()), "t.json").check_machine("riscv64")


@pytest.fixture
def by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a loop sets on the host 10.0.0.2, in a folder beside the table."""
    (tmp_path / "t.json").write_text(json.dumps(groups()))
    (tmp_path / "device1").mkdir()
    monkeypatch.chdir(tmp_path / "device1")
    monkeypatch.setattr(network, "is_own", lambda address: address == "10.0.0.2")
    return {"RANK_TABLE_FILE": "./t.json", "RANK_SIZE": "4", "DEVICE_ID": "1"}


def test_a_loop_by_hand_gives_the_rank_of_this_host_and_device(by_hand: dict[str, str]):
    role = Role.detect(by_hand)
    assert (role.launcher, role.rank, role.world_size, role.local_rank, role.local_world_size) == (
        "rank table", 3, 4, 1, 2,
    )  # fmt: skip
    assert (role.node_rank, role.node_count, role.device_index) == (1, 2, 1)
    assert (role.master_addr, role.master_port) == ("10.0.0.1", rank_table_role.MEETING_PORT)
    assert Role.detect({**by_hand, "MASTER_PORT": "7"}).master_port == 7
    assert Role.detect({**by_hand, "POD_IP": "10.0.0.1"}).rank == 1
    assert Role.detect({name: by_hand[name] for name in ("RANK_TABLE_FILE", "DEVICE_ID")}).world_size == 4


def test_a_table_alone_and_a_device_alone_start_nothing(by_hand: dict[str, str]):
    assert Role.detect({"RANK_TABLE_FILE": "missing.json"}) == Role()
    assert Role.detect({"DEVICE_ID": "GPU-3"}) == Role()
    assert Role.detect({"DEVICE_ID": "0", "RANK_SIZE": "1"}) == Role()


def test_where_a_launcher_speaks_the_table_is_not_needed(by_hand: dict[str, str]):
    cloud = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1"}
    role = Role.detect({**by_hand, "RANK_TABLE_FILE": "missing.json", **cloud})
    assert (role.launcher, role.rank, role.world_size, role.master_addr) == ("torchrun", 1, 2, "10.0.0.9")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK_SIZE": "8"}, "RANK_SIZE=8, but ../t.json lists 4 ranks"),
        ({"DEVICE_ID": "5"}, "DEVICE_ID=5 is not among the devices that ../t.json lists for this host: 0, 1"),
        ({"DEVICE_ID": ""}, "RANK_TABLE_FILE=./t.json and RANK_SIZE=4. needs DEVICE_ID"),
        ({"RANK_TABLE_FILE": ""}, "RANK_SIZE=4 and DEVICE_ID=1. needs RANK_TABLE_FILE"),
    ],
)
def test_a_loop_that_does_not_fit_the_table_is_told(by_hand: dict[str, str], change: dict[str, str], message: str):
    with pytest.raises(RoleError, match=message):
        Role.detect({**by_hand, **change})


def test_a_host_that_is_no_server_or_several_is_told(by_hand: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "is_own", lambda address: False)
    with pytest.raises(RoleError, match=r"lists the servers 10.0.0.1, 10.0.0.2, and none of them is an address"):
        Role.detect(by_hand)
    monkeypatch.setattr(network, "is_own", lambda address: True)
    with pytest.raises(RoleError, match=r"lists device 1 for 10.0.0.1 and 10.0.0.2, which are all .* Set POD_IP"):
        Role.detect(by_hand)


def test_own_addresses_come_from_the_kernels_table():
    trie = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     |-- 10.0.0.7
        /32 host LOCAL
     |-- 10.0.0.255
        /32 link BROADCAST
"""
    assert network.own_addresses(trie) == {"10.0.0.7"}
    assert network.is_own("127.0.0.2")
    assert not network.is_own("203.0.113.9")
