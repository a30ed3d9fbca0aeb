"""Every mode on real server processes and real workers, against its simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest

import ps_simulator as sim
from phalanx.comm import context
from phalanx.comm.agreement import barrier
from phalanx.ps.client.consistency import ConsistencyMode, HalfAsyncMode
from phalanx.ps.client.geo import GeoMode
from phalanx.ps.stores.remote import RemoteStore
from ps_servers import SECRET, servers
from ranks import run_ranks

pytestmark = pytest.mark.dist

SCHEDULE = [0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1]
EVERY = 3
MAKERS = {
    "async": (lambda store, workers: ConsistencyMode(store), sim.Async),
    "half_async": (
        lambda store, workers: HalfAsyncMode(store, steps=EVERY),
        lambda workers: sim.HalfAsync(workers, EVERY),
    ),
    "geo": (
        lambda store, workers: GeoMode(store, steps=EVERY, workers=workers),
        lambda workers: sim.Geo(workers, EVERY),
    ),
}


def store_of(endpoints, worker, workers, mode="async", bound=0):
    return RemoteStore(endpoints, secret=SECRET, worker=worker, workers=workers, mode=mode, bound=bound, timeout_s=30.0)


def steps_at_servers(store):
    """How many pushes of each worker the first server counted."""
    return store._connections[0].call("report", {}).meta["steps"]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mode", list(MAKERS))
def test_rows_on_servers_are_those_of_the_simulator(mode, workers):
    """Two workers in one process, so that their steps come in a known order."""
    make, simulation = MAKERS[mode]
    schedule = [worker % workers for worker in SCHEDULE]
    with servers(2) as made:
        modes = [make(store_of(made.endpoints, worker, workers), workers) for worker in range(workers)]
        for each in modes:
            each.declare([sim.SPEC])
        sim.run(modes, schedule)
        expected = sim.simulate(simulation(workers), schedule)
        np.testing.assert_allclose(sim.table_of(modes[0].store), sim.rows_of(expected), atol=1e-6)
        assert steps_at_servers(modes[0].store) == expected.pushes
        if mode == "geo":
            assert expected.pushes == [math.ceil(schedule.count(w) / EVERY) for w in range(workers)]
        for each in modes:
            each.finish()
            each.store.close()


def test_half_async_waits_until_its_sum_is_applied():
    with servers() as made:
        mode = HalfAsyncMode(store_of(made.endpoints, 0, 1), steps=2)
        mode.declare([sim.SPEC])
        counted = []
        for _ in range(4):
            sim.take_step(mode, 0)
            assert mode.store._push is None
            counted.append(steps_at_servers(mode.store)[0])
        assert counted == [0, 1, 1, 2]
        mode.finish()
        mode.store.close()


# --- sync -----------------------------------------------------------------------------------------------------------


def train_in_sync(endpoints, steps):
    rank = context.init().rank
    mode = ConsistencyMode(store_of(endpoints, rank, len(steps), mode="sync"))
    mode.declare([sim.SPEC])
    for _ in range(steps[rank]):
        sim.take_step(mode, rank)
    is_last = steps[rank] == max(steps)
    rows = sim.table_of(mode.store, mode.pushes) if is_last else None
    mode.finish()
    mode.store.close()
    return rows


def train_sync_once(steps):
    with servers(2) as made:
        tables = [rows for rows in run_ranks(train_in_sync, len(steps), made.endpoints, steps) if rows is not None]
    np.testing.assert_array_equal(tables[0], tables[-1])
    return tables[0]


@pytest.mark.parametrize("steps", [(12, 12), (12, 5)], ids=["even", "one worker runs out of data"])
def test_sync_is_one_process_on_the_global_batch_and_repeats_to_the_bit(steps):
    one, two = train_sync_once(steps), train_sync_once(steps)
    np.testing.assert_array_equal(one, two)
    simulation = sim.Sync(2)
    for step in range(max(steps)):
        simulation.step_all([sim.batch_rows(w) if step < steps[w] else None for w in range(2)])
    np.testing.assert_allclose(one, sim.rows_of(simulation), atol=2e-6)


# --- who waits for whom ---------------------------------------------------------------------------------------------


def train_beside_a_slow_worker(endpoints, steps):
    """Worker 1 takes one step for ten of worker 0's: it waits for a word of worker 0 before each of its own."""
    job = context.init()
    mode = ConsistencyMode(store_of(endpoints, job.rank, 2))
    mode.declare([sim.SPEC])
    store = job_store()
    for step in range(steps if job.rank == 0 else steps // 10):
        if job.rank == 1:
            store.wait([f"step {10 * step + 9}"])
        sim.take_step(mode, job.rank)
        if job.rank == 0:
            store.set(f"step {step}", "taken")
    mode.flush()
    barrier()
    counted = steps_at_servers(mode.store)
    mode.finish()
    mode.store.close()
    return counted


def job_store():
    """The key-value store of the test's ranks."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def test_async_goes_on_beside_a_worker_ten_times_slower():
    with servers() as made:
        counted = run_ranks(train_beside_a_slow_worker, 2, made.endpoints, 40)
    assert counted == [[40, 4], [40, 4]]


def train_within_a_bound(endpoints, bound, steps):
    """Return how many steps behind the other worker was, at each pull that was answered."""
    job = context.init()
    mode = ConsistencyMode(store_of(endpoints, job.rank, 2, mode="bounded", bound=bound))
    mode.declare([sim.SPEC])
    store = job_store()
    for worker in (0, 1):
        store.add(f"pushed {worker}", 0)
    barrier()
    behind = []
    for step in range(steps):
        if job.rank == 1 and step == 0:
            # Let the other get as far as it may.
            store.wait([f"step {bound - 1}"])
        mode.pull([sim.PullSpec("ids", sim.EVERY_KEY)]).rows()
        behind.append(step - store.add(f"pushed {1 - job.rank}", 0))
        # Counted before it is sent: the server can only know less.
        store.add(f"pushed {job.rank}", 1)
        mode.push([])
        if job.rank == 0:
            store.set(f"step {step}", "taken")
    mode.finish()
    mode.store.close()
    return behind


def test_bounded_never_lets_a_worker_run_further_ahead():
    bound, steps = 3, 25
    with servers() as made:
        fast, slow = run_ranks(train_within_a_bound, 2, made.endpoints, bound, steps)
    assert len(fast) == len(slow) == steps
    assert max(fast) <= bound
    assert max(slow) <= bound
    assert fast[bound - 1] == bound - 1, "worker 0 was to go ahead while worker 1 had not begun"
