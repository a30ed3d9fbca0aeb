"""A server's budget: pushes that need more are refused before they change anything."""

from __future__ import annotations

import pytest

from phalanx.cluster.proc import total_bytes
from phalanx.errors import BackendError
from phalanx.ps.server.main import default_budget
from phalanx.ps.server.service import Service
from ps_requests import FakeWorker, gradient


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def worker(service: Service) -> FakeWorker:
    worker = FakeWorker(service)
    worker.declare()
    worker.push(gradient((1, 2), 1.0))
    return worker


def test_a_refused_push_changes_nothing_and_can_be_sent_again(service: Service, worker: FakeWorker) -> None:
    (table,) = service.state.tables.tables.values()
    service.engine.set_budget(table.bytes)
    refused = rf"in table '{table.spec.name}'\. The tables of this server take {table.bytes} bytes and may take "
    with pytest.raises(BackendError, match=refused):
        worker.push(gradient((1, 2, 3), 1.0), step=1)
    assert (table.rows, table.tick) == (2, 1)
    assert not service.stopped.is_set()
    service.engine.set_budget(table.bytes + 10_000)
    worker.push(gradient((1, 2, 3), 1.0), step=1)
    assert table.rows == 3


def test_ids_that_have_rows_need_no_room(service: Service, worker: FakeWorker) -> None:
    (table,) = service.state.tables.tables.values()
    service.engine.set_budget(table.bytes)
    for step in range(1, 20):
        worker.push(gradient((1, 2), 1.0), step=step)
    assert table.rows == 2
    with pytest.raises(BackendError, match="Start more servers, let rows go"):
        worker.push(gradient((3,), 1.0), step=20)


def test_room_is_counted_again_as_rows_come(service: Service, worker: FakeWorker) -> None:
    (table,) = service.state.tables.tables.values()
    service.engine.set_budget(table.bytes + 4000)
    refused_at = 0
    for step in range(1, 400):
        try:
            worker.push(gradient((100 + step,), 1.0), step=step)
        except BackendError:
            refused_at = step
            break
    assert 10 < refused_at < 300


def test_the_default_is_part_of_the_hosts_memory() -> None:
    assert 0 < default_budget() <= total_bytes() * 0.9
