"""Calls of distributed models that raise, call each other or run in several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm.batch.batches import Batches
from phalanx.comm.batch.passes import Passes
from phalanx.comm.batch.share import BatchShare
from phalanx.comm.context import current, init, shutdown
from phalanx.parallel.data.forward_passes import follow_forward_passes


@pytest.fixture
def passes() -> Iterator[Passes]:
    init()
    here = current()
    here.batches = Batches()
    here.passes = Passes(here.batches)
    yield here.passes
    shutdown()


class Net(nn.Module):
    """Calls what it is given, and raises if it is told to."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.ones(2))
        self.raises: type[BaseException] | None = None
        self.meets: threading.Barrier | None = None
        follow_forward_passes(self, is_sum=False)

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        if self.raises is not None:
            raise self.raises
        if self.meets is not None:
            self.meets.wait(timeout=20)
        if depth:
            x = self(x, depth - 1)
        return (x if self.inner is None else self.inner(x)) * self.weight


def given(number: int) -> tuple[Tensor, BatchShare]:
    """Return a batch that a loader gives out now."""
    batches, x, share = current().batches, torch.ones(number, 2), BatchShare(number, 100)
    batches.give(x, share, batches.begin(is_training=True))
    return x, share


def shares(passes: Passes) -> list[tuple[BatchShare, ...]]:
    """Return what the forward passes that wait for their backward pass are of."""
    return [forward.shares for forward in passes._to_come()]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_raises_leaves_nothing_behind_for_the_next(passes: Passes, error: type[BaseException]) -> None:
    outer = Net(inner := Net())
    x, share = given(3)
    inner.raises = error
    with pytest.raises(error):
        outer(x)
    assert shares(passes) == []
    inner.raises = None
    y, other = given(2)
    out = outer(y)
    assert shares(passes) == [(other,), (other,)]
    out.sum().backward()
    again = outer(x)
    assert shares(passes) == [(share,), (share,)]
    del again
    assert error is KeyboardInterrupt or not passes._calls  # torch calls no hook after Ctrl-C


def test_a_call_in_the_handler_of_an_error_is_a_call_like_others(passes: Passes) -> None:
    net = Net()
    x, share = given(3)
    net.raises = RuntimeError
    try:
        net(x)
    except RuntimeError:
        net.raises = None
        out = net(x)
    assert shares(passes) == [(share,)]
    del out


def test_an_error_that_the_outer_model_handles_ends_the_inner_call_alone(passes: Passes) -> None:
    class Careful(Net):
        def forward(self, x: Tensor, depth: int = 0) -> Tensor:
            try:
                return self.inner(x) * self.weight  # type: ignore[misc]
            except ValueError:
                return x * self.weight

    outer = Careful(inner := Net())
    inner.raises = ValueError
    x, share = given(3)
    out = outer(x)
    assert shares(passes) == [(share,)]
    assert not passes._calls
    del out


def test_a_model_that_calls_itself_is_of_one_batch_throughout(passes: Passes) -> None:
    x, share = given(3)
    out = Net()(x, depth=2)
    assert set(shares(passes)) == {(share,)}
    assert not passes._calls
    del out


def test_threads_do_not_take_each_others_calls(passes: Passes) -> None:
    nets, meets = (Net(), Net()), threading.Barrier(2)
    pairs = [given(3), given(2)]
    outs: dict[int, Tensor] = {}

    def call(at: int) -> None:
        nets[at].meets = meets  # both have begun before either ends
        outs[at] = nets[at](pairs[at][0])

    threads = [threading.Thread(target=call, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(outs) == [0, 1]
    assert {own[0].global_rows for own in shares(passes)} == {100}
    assert {own[0].rows for own in shares(passes)} == {3, 2}
    assert not passes._calls
