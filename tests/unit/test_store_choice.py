"""Where the store is, which card and which interface a rank takes: decided from its role and environment alone."""

from __future__ import annotations

import pytest
import torch

from phalanx import accelerator
from phalanx.cluster import network
from phalanx.cluster.role.role import Role
from phalanx.comm import process_group
from phalanx.comm.store import open_store
from phalanx.errors import ConfigError, RoleError

TWO = Role(world_size=2, local_world_size=2, launcher="fleet")
HOSTS = Role(
    world_size=2, node_count=2, master_addr="gpu01", master_port=1, worker_endpoints=("gpu01:1", "gpu02:1")
)  # fmt: skip
ROUTES = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    "eth0\t00000000\t00000000\t0001\t0\t0\t0\t00000000\n"
    "ib0\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\n"  # 10.1.0.0/16
)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "2 ranks need a place to meet, and none is named. Set MASTER_ADDR and MASTER_PORT"),
        ({"PADDLE_GLOO_RENDEZVOUS": "1"}, r"PADDLE_GLOO_RENDEZVOUS=1 is not offered. Set it to 2 \(files\) or 3"),
        ({"PADDLE_GLOO_RENDEZVOUS": "2"}, "PADDLE_GLOO_RENDEZVOUS=2 needs PADDLE_GLOO_FS_PATH"),
        (
            {"PADDLE_GLOO_RENDEZVOUS": "2", "PADDLE_GLOO_FS_PATH": "/dev/null/x"},
            "PADDLE_GLOO_FS_PATH=/dev/null/x cannot",
        ),
        ({"PADDLE_GLOO_RENDEZVOUS": "3", "PADDLE_GLOO_HTTP_ENDPOINT": "here"}, "PADDLE_GLOO_HTTP_ENDPOINT must list"),
    ],
)
def test_an_environment_without_a_usable_store_is_a_clear_error(env, message):
    with pytest.raises(RoleError, match=message):
        open_store(TWO, "prefix", 1.0, env)


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan"])
def test_a_timeout_that_is_no_positive_number_is_refused(monkeypatch, value):
    monkeypatch.setenv("PHALANX_RENDEZVOUS_TIMEOUT_S", value)
    with pytest.raises(RoleError, match=f"must be a positive number of seconds, found '{value}'"):
        process_group.rendezvous_timeout_s()


def test_the_timeout_is_60_seconds_unless_set(monkeypatch):
    assert process_group.rendezvous_timeout_s() == 60.0
    monkeypatch.setenv("PHALANX_RENDEZVOUS_TIMEOUT_S", "7.5")
    assert process_group.rendezvous_timeout_s() == 7.5


def _interface(monkeypatch: pytest.MonkeyPatch, role: Role, names: dict[str, str], set_to: str = "") -> str | None:
    environment = {"GLOO_SOCKET_IFNAME": set_to} if set_to else {}
    monkeypatch.setattr(process_group.os, "environ", environment)
    monkeypatch.setattr(process_group, "addresses_of", lambda host: [names[host]] if host in names else [])
    monkeypatch.setattr(network, "system_routes", lambda: ROUTES)
    process_group._choose_interface(role)
    return environment.get("GLOO_SOCKET_IFNAME")


def test_the_interface_is_the_one_towards_the_master(monkeypatch):
    assert _interface(monkeypatch, HOSTS, {"gpu01": "10.1.0.1"}) == "ib0"
    assert _interface(monkeypatch, HOSTS, {"gpu01": "192.168.0.1"}) == "eth0"
    one_host = Role(world_size=2, local_world_size=2, master_addr="127.0.0.1", master_port=1)
    assert _interface(monkeypatch, one_host, {"127.0.0.1": "127.0.0.1"}) == "lo"


def test_an_interface_the_user_chose_is_kept(monkeypatch):
    assert _interface(monkeypatch, HOSTS, {"gpu01": "10.1.0.1"}, set_to="eth7") == "eth7"


def test_a_master_name_that_means_127_0_1_1_here_does_not_bind_loopback(monkeypatch):
    assert _interface(monkeypatch, HOSTS, {"gpu01": "127.0.1.1", "gpu02": "10.1.0.2"}) == "ib0"
    assert _interface(monkeypatch, HOSTS, {"gpu01": "127.0.1.1"}) == "eth0"


def test_a_master_that_resolves_to_loopback_on_another_host_is_an_error(monkeypatch):
    second = Role(rank=1, world_size=2, node_rank=1, node_count=2, master_addr="gpu01", master_port=1)
    with pytest.raises(RoleError, match=r"MASTER_ADDR=gpu01 resolves to 127\.0\.1\.1 here.*job has 2 hosts\. Set"):
        _interface(monkeypatch, second, {"gpu01": "127.0.1.1"})


def _cuda(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    chosen: list[int] = []
    monkeypatch.setattr(accelerator, "find_kind", lambda: "cuda" if count else None)
    monkeypatch.setattr(accelerator, "count_devices", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.mark.parametrize(("count", "local_rank", "index"), [(4, 2, 2), (1, 0, 0), (1, 3, 0)])
def test_a_rank_takes_its_card_or_the_only_visible_one(monkeypatch, count, local_rank, index):
    chosen = _cuda(monkeypatch, count)
    device = process_group.pick_device(Role(local_rank=local_rank, local_world_size=4, rank=0, world_size=1))
    assert device == torch.device("cuda", index)
    assert chosen == [index]


def test_servers_and_hosts_without_cards_compute_on_the_cpu(monkeypatch):
    _cuda(monkeypatch, 0)
    assert process_group.pick_device(Role()) == torch.device("cpu")
    _cuda(monkeypatch, 4)
    assert process_group.pick_device(Role(kind="server")) == torch.device("cpu")


def test_more_ranks_than_cards_is_an_error(monkeypatch):
    _cuda(monkeypatch, 2)
    with pytest.raises(ConfigError, match="Local rank 2 needs device 2, but this host shows 2"):
        process_group.pick_device(Role(local_rank=2, local_world_size=3))
