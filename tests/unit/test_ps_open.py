"""From a role and a push to a mode, and the words that say what it promises."""

from __future__ import annotations

import logging

import pytest
import torch

from phalanx.cluster.role.role import Role
from phalanx.comm.context import Context
from phalanx.errors import ConfigError
from phalanx.plan.value import Push
from phalanx.ps.client import connect
from phalanx.ps.client.consistency import AsyncMode, ConsistencyMode, HalfAsyncMode
from phalanx.ps.client.geo import GeoMode
from phalanx.ps.stores.local import LocalStore

PUSHES = {
    "sync": (Push(mode="sync"), ConsistencyMode, "sync", 0),
    "async": (Push(mode="async"), AsyncMode, "async", 0),
    "bounded": (Push(mode="bounded", steps=4), ConsistencyMode, "bounded", 4),
    "half_async": (Push(mode="half_async", steps=4), HalfAsyncMode, "async", 0),
    "geo": (Push(mode="geo", steps=4), GeoMode, "async", 0),
}
SERVERS = ("127.0.0.1:1", "127.0.0.1:2")


def context(**about):
    return Context(role=Role(**about), device=torch.device("cpu"))


@pytest.fixture
def asked(monkeypatch):
    """What a store over servers was made with, without any server."""
    made = []

    class Connectionless(connect.RemoteStore):
        def __init__(self, endpoints, **about):
            made.append((endpoints, about))

    monkeypatch.setattr(connect, "RemoteStore", Connectionless)
    return made


@pytest.mark.parametrize("name", list(PUSHES))
def test_each_mode_asks_the_servers_for_what_they_have_to_wait_for(name, asked, monkeypatch):
    push, kind, mode, bound = PUSHES[name]
    monkeypatch.setenv("PHALANX_SERVER_RETRY_S", "60")
    opened = connect.open_consistency(context(rank=1, world_size=2, server_endpoints=SERVERS, secret=b"s" * 32), push)
    assert type(opened) is kind
    ((endpoints, about),) = asked
    assert endpoints == SERVERS
    assert (about["worker"], about["workers"]) == (1, 2)
    assert (about["mode"], about["bound"], about["retry_s"]) == (mode, bound, 60.0)


@pytest.mark.parametrize("name", list(PUSHES))
def test_alone_and_without_servers_tables_are_here(name, caplog, phalanx_propagates):
    with caplog.at_level(logging.INFO):
        opened = connect.open_consistency(context(), PUSHES[name][0])
    assert isinstance(opened.store, LocalStore)
    assert "in this process; nothing is stale" in caplog.text


@pytest.mark.parametrize(
    ("push", "said"),
    [
        (Push(mode="sync"), "never stale; every step waits for all 3 workers"),
        (Push(mode="async"), "without a bound"),
        (Push(mode="bounded", steps=4), "never more than 4 steps ahead of the slowest"),
        (Push(mode="half_async", steps=4), "sum of 4 steps"),
        (Push(mode="geo", steps=4), "its difference / 3 every 4 steps"),
    ],
)
def test_the_start_says_how_stale_rows_can_be_and_where_dense_parameters_live(push, said):
    first, second = connect.contract(push, workers=3, servers=2, dense="servers")
    assert f"mode {push.mode}, 3 workers, 2 servers" in first
    assert said in first
    assert "on the servers, as stale as rows" in second
    _, second = connect.contract(push, workers=3, servers=2, dense="workers")
    assert "on every worker, equal by all-reduce" in second
    _, second = connect.contract(push, workers=1, servers=2, dense="workers")
    assert "in this process" in second


def test_several_workers_need_a_server():
    with pytest.raises(
        ConfigError, match=r"no parameter server. Launch with `phalanx run --server-num 1 --worker-num 3"
    ):
        connect.open_consistency(context(world_size=3), Push(mode="async"))


def test_a_job_without_a_secret_is_told_to_set_one():
    with pytest.raises(ConfigError, match=r"PHALANX_JOB_SECRET is not set.*openssl rand -hex 32"):
        connect.open_consistency(context(server_endpoints=("10.0.0.1:6170", "127.0.0.1:6170")), Push(mode="async"))


def test_on_loopback_the_secret_is_this_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    role = context(server_endpoints=SERVERS).role
    assert len(connect.secret_of(role)) == 32
    assert connect.secret_of(role) == connect.secret_of(role)
    assert (tmp_path / "phalanx" / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["soon", "-1", "inf"])
def test_a_wrong_number_of_seconds_is_named(text, asked, monkeypatch):
    monkeypatch.setenv("PHALANX_SERVER_RETRY_S", text)
    with pytest.raises(ConfigError, match=f"PHALANX_SERVER_RETRY_S must be a number of seconds, found '{text}'"):
        connect.open_consistency(context(server_endpoints=SERVERS, secret=b"s" * 32), Push(mode="async"))
