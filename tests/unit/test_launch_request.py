"""What the user typed, against a machine made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ConfigError, LaunchError
from phalanx.launch.request import devices, machine, nodes, request
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.options import Options

CPU = Machine(cores=4)
FOUR_CARDS = Machine(cores=16, gpus=("0", "1", "2", "3"), has_cuda_build=True)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.fixture
def this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with the address 10.0.0.2 beside loopback, and a name of each kind."""
    names = {"vm": "127.0.1.1", "other": "10.0.0.1", "here": "10.0.0.2"}
    monkeypatch.setattr(machine, "resolve", lambda host: names.get(host, host))
    monkeypatch.setattr(machine, "is_own_address", lambda address: address in ("10.0.0.2", "127.0.0.1", "127.0.0.2"))
    monkeypatch.setattr(machine, "address_towards", lambda peer: "10.0.0.2")


def options(script: str, **flags: Any) -> Options:
    return Options(training_script=script, **flags)


def test_without_a_number_cpu_gets_one_process_and_cards_get_one_each(script: str) -> None:
    assert devices.ranks_per_node(options(script), CPU) == 1
    assert devices.ranks_per_node(options(script), FOUR_CARDS) == 4


@pytest.mark.parametrize("gpus", ["1,3", "1, 3", " 1 ,3 "])
def test_gpus_may_be_written_with_spaces(script: str, gpus: str) -> None:
    assert devices.select_gpus(options(script, gpus=gpus), FOUR_CARDS) == ("1", "3")


def test_gpus_are_among_the_cards_that_cuda_visible_devices_leaves(script: str) -> None:
    here = Machine(cores=4, gpus=("2", "3"), has_cuda_build=True, hidden_by="CUDA_VISIBLE_DEVICES=2,3")
    assert devices.select_gpus(options(script, gpus="3"), here) == ("3",)
    with pytest.raises(LaunchError, match=r"GPU 1, but this host offers 2, 3 \(limited by CUDA_VISIBLE_DEVICES=2,3\)"):
        devices.select_gpus(options(script, gpus="1"), here)


def test_gpus_without_cuda_name_the_cpu_way(script: str) -> None:
    with pytest.raises(
        LaunchError, match=r"needs CUDA, but the installed torch is a CPU build. To compute on the CPU, .* -n 2"
    ):
        devices.select_gpus(options(script, gpus="0,1"), CPU)
    hidden = Machine(cores=4, has_cuda_build=True, hidden_by="CUDA_VISIBLE_DEVICES=")
    with pytest.raises(LaunchError, match=r"no GPU is visible \(CUDA_VISIBLE_DEVICES=\)"):
        devices.select_gpus(options(script, gpus="0"), hidden)
    with pytest.raises(LaunchError, match="no NVIDIA GPU was found"):
        devices.select_gpus(options(script, gpus="0"), Machine(cores=4, has_cuda_build=True))


def test_workers_beside_servers_compute_on_the_cpu_without_gpus(script: str) -> None:
    """What is advised for `--server-num=1 --worker-num=2 --gpus=0,1` works."""
    asked = {"server_num": 1, "worker_num": 2}
    with pytest.raises(LaunchError, match=r"To compute on the CPU, leave --gpus out: --worker-num says how many\."):
        request.resolve(options(script, gpus="0,1", **asked), CPU)
    assert request.resolve(options(script, **asked), CPU).counts["worker"] == 2


def test_a_host_of_servers_alone_needs_no_cards(script: str, this_host: None) -> None:
    """GPU workers on another host: the same command on both."""
    flags = {"servers": "10.0.0.2:6170", "workers": "10.0.0.1:6171,10.0.0.1:6172", "gpus": "0,1"}
    found = request.resolve(options(script, **flags), CPU)
    assert (found.counts["server"], found.counts["worker"], found.gpus) == (1, 0, ())


def test_more_processes_than_cards_is_an_error(script: str) -> None:
    with pytest.raises(LaunchError, match="asks for 5 processes, but there are 4 GPUs"):
        devices.ranks_per_node(options(script, nproc_per_node=5), FOUR_CARDS)
    with pytest.raises(LaunchError, match="lists GPU 1 twice"):
        devices.select_gpus(options(script, gpus="1,1"), FOUR_CARDS)
    with pytest.raises(LaunchError, match="lists no GPU"):
        devices.select_gpus(options(script, gpus=" , "), FOUR_CARDS)


def test_every_worker_gets_cards_of_its_own(script: str) -> None:
    dealt = devices.assign_gpus(options(script), FOUR_CARDS, 3, only_if_asked=False)
    assert dealt == (("0", "1"), ("2",), ("3",))
    assert devices.assign_gpus(options(script), FOUR_CARDS, 2, only_if_asked=True) == ()
    assert devices.assign_gpus(options(script, gpus="all"), FOUR_CARDS, 2, only_if_asked=True) == (
        ("0", "1"),
        ("2", "3"),
    )


def test_all_cards_are_those_that_can_be_seen_and_there_must_be_one(script: str) -> None:
    here = Machine(cores=4, gpus=("2", "3"), has_cuda_build=True, hidden_by="CUDA_VISIBLE_DEVICES=2,3")
    assert devices.select_gpus(options(script, gpus="all"), here) == ("2", "3")
    with pytest.raises(LaunchError, match="--gpus all needs CUDA, but the installed torch is a CPU build"):
        devices.select_gpus(options(script, gpus="all"), CPU)


def test_a_host_of_servers_alone_needs_no_card_for_the_same_command(script: str) -> None:
    assert devices.assign_gpus(options(script, gpus="0,1"), CPU, 0, only_if_asked=True) == ()


def test_cuda_visible_devices_ends_at_the_first_unknown_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_count_gpus", lambda: 4)
    assert Machine.detect({"CUDA_VISIBLE_DEVICES": "2,0,9,1"}).gpus == ("2", "0")
    assert Machine.detect({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()
    assert Machine.detect({}).gpus == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("flags", "mode", "given"),
    [
        ({}, "collective", ()),
        ({"nproc_per_node": 2}, "collective", ()),
        ({"ips": "10.0.0.1"}, "collective", ("--ips",)),
        ({"gpus": "0", "http_port": 7000}, "collective", ()),
        ({"server_num": 1, "worker_num": 2}, "ps", ("--worker-num", "--server-num")),
        ({"servers": "a:1", "workers": "a:2"}, "ps", ("--servers", "--workers")),
    ],
)
def test_the_mode_follows_from_the_flags(script: str, flags: dict[str, Any], mode: str, given: tuple[str, ...]) -> None:
    assert request.detect_mode(options(script, **flags)) == (mode, given)


def test_flags_of_both_modes_are_refused(script: str) -> None:
    with pytest.raises(LaunchError, match=r"--nproc-per-node starts collective .* --server-num .* both were given"):
        request.detect_mode(options(script, nproc_per_node=2, server_num=1))


def test_launch_ps_wants_servers(script: str) -> None:
    with pytest.raises(LaunchError, match="launch_ps starts a parameter-server job, but neither"):
        request.detect_mode(options(script, wants_servers=True))


def test_a_parameter_server_job_needs_both_roles(script: str, this_host: None) -> None:
    with pytest.raises(LaunchError, match="--worker-num is missing"):
        request.resolve(options(script, server_num=1), CPU)
    with pytest.raises(LaunchError, match="--server-num is missing"):
        request.resolve(options(script, worker_num=1), CPU)


def test_endpoint_lists_give_each_host_its_processes(script: str, this_host: None) -> None:
    found = request.resolve(
        options(script, servers="10.0.0.1:6000", workers="10.0.0.1:6001,10.0.0.2:6001,10.0.0.2:6002"), CPU
    )
    assert found.counts == {"server": 0, "worker": 2, "heter_worker": 0}
    assert found.nodes == nodes.Nodes(("10.0.0.1", "10.0.0.2"), 2, 1, "10.0.0.2")


def test_endpoint_lists_may_name_hosts(script: str, this_host: None) -> None:
    found = request.resolve(options(script, servers="other:6000", workers="other:6001,here:6001,here:6002"), CPU)
    assert found.counts == {"server": 0, "worker": 2, "heter_worker": 0}
    assert found.endpoints["server"] == ("10.0.0.1:6000",)
    assert found.endpoints["worker"] == ("10.0.0.1:6001", "10.0.0.2:6001", "10.0.0.2:6002")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"servers": "10.0.0.2:6000", "workers": ""}, "--workers is empty"),
        (
            {"servers": "10.0.0.2", "workers": "10.0.0.2:1"},
            "--servers must list host:port entries .*, found '10.0.0.2'",
        ),
        ({"servers": "10.0.0.2:70000", "workers": "10.0.0.2:1"}, "ports from 1 to 65535"),
        ({"servers": "10.0.0.2:1", "workers": "10.0.0.2:1"}, "10.0.0.2:1 is listed 2 times"),
        (
            {"servers": "10.0.0.2:1", "workers": "10.0.0.2:2", "worker_num": 2},
            "--worker-num is 2, but --workers lists 1",
        ),
    ],
)
def test_endpoint_lists_are_checked(script: str, this_host: None, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request.resolve(options(script, **flags), CPU)


def test_this_host_is_found_in_the_list(script: str, this_host: None) -> None:
    found = nodes.collective_nodes(options(script, ips="10.0.0.1, 10.0.0.2"), CPU)
    assert (found.rank, found.count, found.address) == (1, 2, "10.0.0.2")


def test_pod_ip_decides_between_addresses_that_are_all_ours(script: str, this_host: None) -> None:
    here = Machine(cores=4, pod_ip="127.0.0.2")
    assert nodes.collective_nodes(options(script, ips="127.0.0.1,127.0.0.2"), here).rank == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"ips": "10.0.0.1,10.0.0.3"},
            r"None of the hosts .* is this host \(its address towards 10.0.0.1 is 10.0.0.2\)",
        ),
        ({"ips": "127.0.0.1,127.0.0.2"}, r"its place is open. Add --node-rank \(0 or 1\)"),
        (
            {"ips": "10.0.0.1,10.0.0.2", "node_rank": 0},
            "--node-rank 0 is 10.0.0.1, which is not an address of this host",
        ),
        ({"ips": "10.0.0.1,10.0.0.2", "node_rank": 2}, r"--node-rank 2 is outside 0..1"),
        ({"ips": "10.0.0.2,10.0.0.2"}, r"10.0.0.2 \(10.0.0.2\) is listed twice"),
        ({"ips": "10.0.0.1,vm"}, "'vm' resolves to 127.0.1.1 .* which no other host can reach"),
        ({"ips": " , "}, "lists no host"),
        ({"ips": "10.0.0.1,10.0.0.2", "nnodes": 3}, "--nnodes is 3, but --ips lists 2"),
        ({"nnodes": 2}, "--master-addr is missing"),
        ({"nnodes": 2, "master_addr": "10.0.0.1"}, "--node-rank is missing"),
        (
            {"nnodes": 2, "master_addr": "10.0.0.1", "node_rank": 0},
            "--node-rank 0 is the host of --master-addr 10.0.0.1",
        ),
        ({"nnodes": 2, "master_addr": "vm", "node_rank": 0}, "'vm' resolves to 127.0.1.1"),
        ({"master_addr": "10.0.0.1"}, "--master-addr 10.0.0.1 is not this host, and --nnodes is 1"),
    ],
)
def test_host_lists_are_checked(script: str, this_host: None, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        nodes.collective_nodes(options(script, **flags), CPU)


def test_counted_nodes_know_only_the_first_host(script: str, this_host: None) -> None:
    found = nodes.collective_nodes(options(script, nnodes=2, node_rank=1, master_addr="other"), CPU)
    assert (found.hosts, found.address, found.name(1)) == (("10.0.0.1",), "10.0.0.2", "node 1")


def test_one_host_may_use_its_own_name(script: str, this_host: None) -> None:
    assert nodes.collective_nodes(options(script, ips="127.0.0.1"), CPU).is_multi_node is False


def test_the_script_must_be_a_readable_file(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="does not exist"):
        request.check_script(str(tmp_path / "none.py"))
    with pytest.raises(LaunchError, match=r"is a directory\. Give the Python file to run"):
        request.check_script(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("-n", "2"), "-n"),
        (("--lr", "0.1", "--nproc-per-node=2"), "--nproc-per-node=2"),
        (("--server-num", "1"), "--server-num"),
        (("--lr", "0.1", "--log-dir", "x", "n"), ""),
    ],
)
def test_a_flag_of_the_launcher_after_the_script_is_seen(script: str, arguments: tuple[str, ...], found: str) -> None:
    assert options(script, training_script_args=arguments).misplaced_flag == found


def test_the_banner_has_thirteen_settings_in_order(script: str) -> None:
    names = [name for name, _ in options(script).banner_items()]
    assert names == sorted(names)
    assert len(names) == 13
    shown = dict(options(script, training_script_args=("--lr", "0.1")).banner_items())
    assert (shown["ips"], shown["gpus"], shown["servers"]) == ("127.0.0.1", "None", "")
    assert shown["training_script_args"] == "['--lr', '0.1']"


def test_a_folder_for_servers_needs_servers(script: str) -> None:
    with pytest.raises(LaunchError, match=r"--server-dir kept is for parameter servers, and none were asked for"):
        request.resolve(options(script, server_dir="kept"), CPU)
