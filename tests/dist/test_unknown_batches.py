"""Loops that compute on converted copies of batches: exact, or refused before the first update."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import ConfigError
from ranks import run_ranks

pytestmark = pytest.mark.dist

GLOBAL = 12
"""Rows of a full batch, which 2 and 3 ranks divide."""

UNEVEN = 31
"""Rows of an epoch whose last of 3 batches neither divides."""


class Rows(torch.utils.data.Dataset[tuple[Tensor]]):
    def __init__(self, count: int, seed: int = 1) -> None:
        self.x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.x[index],)


def converted(loader: Any) -> Iterator[Tensor]:
    """Copies; nothing is left of the batch itself."""
    return (batch[0].clone() for batch in loader)


def read_ahead(loader: Any) -> Iterator[Tensor]:
    batches = converted(loader)
    ahead = next(batches, None)
    while ahead is not None:
        x, ahead = ahead, next(batches, None)
        yield x


def listed(loader: Any) -> Iterator[Tensor]:
    yield from list(converted(loader))


def cut_off(loader: Any) -> Iterator[Tensor]:
    """The whole epoch, left before the loader knows that it is over."""
    yield from list(converted(itertools.islice(loader, len(loader))))


def before_another_loader(loader: Any) -> Iterator[Tensor]:
    batches = list(converted(loader))
    list(converted(px.data.ShardedLoader(Rows(GLOBAL * 2, 2), global_batch=GLOBAL)))
    yield from batches


def resumed(loader: Any) -> Iterator[Tensor]:
    """The last batch of an epoch and the whole next one, read ahead."""
    loader.load_state_dict({**loader.state_dict(), "position": GLOBAL * 2})
    yield from read_ahead(itertools.chain(loader, loader))


def plain(loader: Any) -> Iterator[Tensor]:
    for (x,) in loader:
        yield x.clone()


def counted_before(loader: Any) -> Iterator[Tensor]:
    sum(len(x) for (x,) in loader)
    loader.set_epoch(0)
    yield from plain(loader)


def looked_at_before(loader: Any) -> Iterator[Tensor]:
    len(next(iter(loader))[0])
    loader.set_epoch(0)
    yield from plain(loader)


def left_before(loader: Any) -> Iterator[Tensor]:
    for _ in itertools.islice(plain(loader), 2):
        pass
    loader.set_epoch(0)
    yield from plain(loader)


def probed(loader: Any) -> Iterator[Tensor]:
    """Between recognised batches that are all there, a call of which no gradient is asked."""
    for (x,) in list(loader):
        probe(x.clone())
        yield x


probe: Callable[[Tensor], Any] = len
"""The model of the loop that runs."""

READING_AHEAD = (read_ahead, listed, cut_off, before_another_loader)
ONE_BY_ONE = (plain, counted_before, looked_at_before, left_before, probed)


def trained(loop: Callable[[Any], Iterator[Tensor]], rows: int, **options: Any) -> tuple[float, str | None]:
    """Train in a loop; return how far it is off one process over whole batches, and the error it ended with."""
    global probe
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5)).double()
    start, reference = copy.deepcopy(model), copy.deepcopy(model)
    optimizer, sgd = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference))
    data = Rows(rows)
    _, _, loader = px.distribute(model, optimizer, data, global_batch=GLOBAL, shuffle=False, **options)
    probe = model
    error = None
    try:
        for x in loop(loader):
            F.mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    except ConfigError as caught:
        error, reference = str(caught), start
    else:
        for x in data.x.split(GLOBAL):
            if len(x) == GLOBAL or not options.get("drop_last"):
                F.mse_loss(reference(x), x).backward()
                sgd.step()
                sgd.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(((p - r).norm() / r.norm()).item() for p, r in pairs), error


def uneven() -> dict[str, Any]:
    px.init()
    return {loop.__name__: trained(loop, UNEVEN) for loop in (*READING_AHEAD, *ONE_BY_ONE, resumed)}


def even() -> dict[str, Any]:
    px.init()
    whole = {loop.__name__: trained(loop, GLOBAL * 3) for loop in (*READING_AHEAD, *ONE_BY_ONE)}
    return whole | {f"{loop.__name__}, cut": trained(loop, UNEVEN, drop_last=True) for loop in READING_AHEAD}


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_cannot_be_known_in_an_uneven_epoch_is_refused_before_the_first_update(ranks: int) -> None:
    for results in run_ranks(uneven, ranks, timeout_s=110):
        for loop in (*READING_AHEAD, resumed):
            off, error = results.pop(loop.__name__)
            assert off == 0, loop.__name__  # not one update
            assert f"which weigh differently on {ranks} ranks" in error
            assert "px.use_batch(batch)" in error
            assert "drop_last=True" in error
        assert {name: value for name, value in results.items() if value[1] or value[0] > 1e-13} == {}


@pytest.mark.parametrize("ranks", [2, 3])
def test_loops_over_even_epochs_may_read_ahead(ranks: int) -> None:
    for results in run_ranks(even, ranks, timeout_s=110):
        assert {name: value for name, value in results.items() if value[1] or value[0] > 1e-13} == {}
