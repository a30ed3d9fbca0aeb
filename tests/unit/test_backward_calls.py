"""One wrapper of `torch.autograd.backward` calls its listeners in a stated order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.comm.batch import backward_calls
from phalanx.comm.batch.backward_calls import Backward, BackwardOrder, Listener, around_backward


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # put back afterwards
    monkeypatch.setattr(backward_calls, "_calls", backward_calls._Calls())


def noting(name: str, seen: list[str]) -> Listener:
    def listener(backward: Backward, tensors: Any, *args: Any, **options: Any) -> None:
        seen.append(name)
        backward(tensors, *args, **options)
        seen.append(f"{name} ends")

    return listener


def loss_of(param: torch.Tensor) -> torch.Tensor:
    return (param * param).sum()


def test_listeners_are_called_in_their_order_whoever_came_first() -> None:
    seen: list[str] = []
    for order in (BackwardOrder.LOSSES, BackwardOrder.MEANS, BackwardOrder.MEMORY):
        around_backward(order, noting(order.name, seen))
    param = torch.ones(2, requires_grad=True)
    loss_of(param).backward()
    assert seen == ["MEANS", "MEMORY", "LOSSES", "LOSSES ends", "MEMORY ends", "MEANS ends"]
    assert torch.equal(param.grad, torch.full((2,), 2.0))


def test_torchs_function_is_wrapped_once() -> None:
    before, seen = torch.autograd.backward, list[str]()
    listener = noting("listener", seen)
    around_backward(BackwardOrder.MEANS, listener)
    wrapped = torch.autograd.backward
    around_backward(BackwardOrder.MEANS, listener)
    around_backward(BackwardOrder.LOSSES, noting("losses", seen))
    assert torch.autograd.backward is wrapped is not before
    loss_of(torch.ones(1, requires_grad=True)).backward()
    assert seen.count("listener") == 1


def test_an_error_of_a_pass_is_the_error_of_the_call() -> None:
    def repeating(backward: Backward, tensors: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(RuntimeError, match="does not require grad"):
            backward(tensors, *args, **options)
        backward(tensors, *args, **options)

    around_backward(BackwardOrder.MEMORY, repeating)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()


def test_where_someone_puts_torchs_function_back_the_next_listener_wraps_it_again() -> None:
    before, seen = torch.autograd.backward, list[str]()
    around_backward(BackwardOrder.MEANS, noting("means", seen))
    torch.autograd.backward = before
    around_backward(BackwardOrder.LOSSES, noting("losses", seen))
    loss_of(torch.ones(1, requires_grad=True)).backward()
    assert seen[:2] == ["means", "losses"]


def test_arguments_reach_torch() -> None:
    around_backward(BackwardOrder.LOSSES, noting("losses", []))
    param = torch.ones(2, requires_grad=True)
    loss = loss_of(param)
    torch.autograd.backward(loss, torch.tensor(2.0), retain_graph=True)
    torch.autograd.backward([loss], grad_tensors=[torch.tensor(1.0)], inputs=[param])
    assert torch.equal(param.grad, torch.full((2,), 6.0))
