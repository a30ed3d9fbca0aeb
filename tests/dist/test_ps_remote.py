"""Rows on real server processes, as one worker sees them."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest

import ps_simulator as sim
from phalanx.errors import ConfigError, PeerLostError
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.local import LocalStore
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from ps_servers import SECRET, servers

pytestmark = pytest.mark.dist


def connected(endpoints, **about):
    about = {"secret": SECRET, "worker": 0, "workers": 1, "timeout_s": 30.0} | about
    return RemoteStore(endpoints, **about)


def train(store, steps):
    for step in range(steps):
        store.push([], step=step)
        store.pull([PullSpec("ids", sim.EVERY_KEY)], step=step + 1).rows()


@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_read_as_they_were_written(count):
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 5000)
    values = np.random.default_rng(1).random((len(keys), sim.DIM), np.float32)
    with servers(count) as made:
        store = connected(made.endpoints)
        store.declare([sim.SPEC])
        store.push([TableUpdate("ids", keys, values, kind="assign")])
        for step in (1, 2):
            pulled = store.pull([PullSpec("ids", keys)], step=step)
            np.testing.assert_array_equal(pulled.rows()[0], values)
            # What a pull returned is the caller's: later requests do not write over it.
            pulled.rows()[0][:] = -1.0
            store.push([TableUpdate("ids", keys, np.zeros_like(values))], step=step)
        assert store.report()["ids"].rows == len(keys)
        store.leave()
        store.close()


def test_a_push_of_200_mb_arrives():
    keys = np.arange(50_000, dtype=np.int64)
    spec = dataclasses.replace(sim.SPEC, name="wide", dim=1024)
    with servers() as made:
        store = connected(made.endpoints)
        store.declare([spec])
        store.push([TableUpdate("wide", keys, np.ones((len(keys), 1024), np.float32))])
        (rows,) = store.pull([PullSpec("wide", keys[-3:])], step=1).rows()
        np.testing.assert_allclose(rows, sim.START - sim.LR)
        store.leave()
        store.close()


def test_a_killed_server_is_an_error_that_names_it_at_once():
    with servers(2) as made:
        store = connected(made.endpoints)
        store.declare([sim.SPEC])
        made[1].kill()
        with pytest.raises(PeerLostError, match=r"worker 0 asked server 1 at .* for '(pull|push)'"):
            train(store, steps=3)
        store.close()


def test_servers_may_come_after_their_workers_and_in_any_order(monkeypatch, caplog, phalanx_propagates):
    monkeypatch.setattr("phalanx.ps.wire.client.dial._LOG_EVERY_S", 0.0)
    caplog.set_level("INFO", "phalanx.ps.wire")
    found = []

    def work():
        store = connected(made.endpoints)
        store.declare([sim.SPEC])
        train(store, steps=2)
        found.append(store.report()["ids"].rows)
        store.leave()
        store.close()

    with servers(2, started=False) as made:
        worker = threading.Thread(target=work)
        worker.start()
        said = f"worker 0: waiting for server 0 at {made[0].endpoint} (Connection refused)"
        deadline = time.monotonic() + 20
        while said not in caplog.text:
            assert time.monotonic() < deadline
        made[1].start()
        made[0].start()
        worker.join(30)
        assert [server.end() for server in made] == [0, 0]
    assert found == [0]


def test_an_error_of_a_server_is_raised_as_what_it_is():
    with servers() as made:
        store = connected(made.endpoints)
        store.declare([sim.SPEC])
        with pytest.raises(ConfigError, match=r"table 'ids' was made with dim=3 and is now asked with dim=4"):
            store.declare([dataclasses.replace(sim.SPEC, dim=4)])
        with pytest.raises(ConfigError, match=r"servers run with mode='async'"):
            connected(made.endpoints, mode="sync").declare([])
        with pytest.raises(ConfigError, match=r"secret"):
            connected(made.endpoints, secret=bytes(32))
        store.leave()
        store.close()


def test_what_two_servers_saved_three_load(tmp_path):
    keys = np.arange(-500, 500, dtype=np.int64)
    values = np.random.default_rng(1).random((len(keys), sim.DIM), np.float32)
    with servers(2) as made:
        store = connected(made.endpoints)
        store.declare([sim.SPEC])
        store.push([TableUpdate("ids", keys, values, kind="assign")])
        store.save(tmp_path / "snapshot", {"epoch": 2})
        store.leave()
        store.close()
    with servers(3) as made:
        store = connected(made.endpoints)
        assert store.load(tmp_path / "snapshot")["epoch"] == 2
        store.declare([sim.SPEC])
        (rows,) = store.pull([PullSpec("ids", keys)]).rows()
        np.testing.assert_array_equal(rows, values)
        store.push([TableUpdate("ids", keys, values)])
        assert store.load(tmp_path / "snapshot", ["ids"])["epoch"] == 2
        np.testing.assert_array_equal(store.pull([PullSpec("ids", keys)], step=1).rows()[0], values)
        store.leave()
        store.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_goes_on_over_servers_that_are_killed_and_started_again(mode, tmp_path):
    """Between pull and push a server forgets the pull; between push and pull it may not have answered."""
    local = LocalStore()
    with servers(2, tmp_path, {"PHALANX_SERVER_RETRY_S": "30"}, state=True) as made:
        store = connected(made.endpoints, mode=mode, retry_s=30.0)
        for each in (store, local):
            each.declare([sim.SPEC])
        for step in range(8):
            keys = sim.keys_of(0, step)
            rows, expected = (each.pull([PullSpec("ids", keys)], step=step).rows()[0] for each in (store, local))
            np.testing.assert_array_equal(rows, expected)
            if step == 2:
                made[0].kill()
                made[0].start()
            for each in (store, local):
                each.push([TableUpdate("ids", keys, np.sin(rows))], step=step)
            if step == 5:
                made[1].kill()
                made[1].start()
        np.testing.assert_array_equal(sim.table_of(store, 8), sim.table_of(local))
        assert store.report()["ids"].pushed == local.report()["ids"].pushed
        store.leave()
        store.close()
