"""Merged gradients train as one large batch."""

import copy
import gc
import pickle
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.comm.context import BatchShare
from phalanx.errors import ConfigError
from phalanx.parallel.optim.clip import clip_grad_norm_
from phalanx.parallel.optim.gradient_accumulation import AccumulatedGradients, accumulate_gradients
from phalanx.parallel.precision.loss_scale import LossScale
from phalanx.parallel.step.gate import follow_updates
from phalanx.plan.value import Scaler


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def made(k_steps: int, avg: bool = True, lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    px.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    accumulate_gradients(optimizer, model, k_steps, avg=avg)
    return model, optimizer


def batches(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 5, generator=generator, dtype=torch.float64) for size in sizes]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor], zero: str = "before") -> None:
    for x in data:
        px.current().batch = BatchShare(len(x), len(x))
        if zero == "before":
            optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        optimizer.step()
        if zero == "model":
            model.zero_grad()


@pytest.mark.parametrize("zero", ["before", "model"])
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (4, 4, 4, 1), (4, 2, 3, 4)])
def test_k_batches_equal_one_large_one(zero: str, sizes: tuple[int, ...]) -> None:
    model, optimizer = made(2)
    train(model, optimizer, batches(*sizes), zero)
    reference = net()
    first, second, third, fourth = batches(*sizes)
    own = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train(reference, own, [torch.cat([first, second]), torch.cat([third, fourth])])
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-14)


def test_the_sum_is_that_of_the_batches_gradients() -> None:
    model, optimizer = made(3, avg=False)
    train(model, optimizer, batches(2, 2, 2))
    reference = net()
    own = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for x in batches(2, 2, 2):
        reference(x).square().sum(1).mean().backward()
    own.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_clipping_in_the_loop_acts_on_the_complete_gradient() -> None:
    model, optimizer = made(2)
    norms = []
    for x in batches(4, 4):
        optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        norms.append(clip_grad_norm_(model, 0.01))
        optimizer.step()
    reference = net()
    reference(torch.cat(batches(4, 4))).square().sum(1).mean().backward()
    torch.testing.assert_close(norms[1], clip_grad_norm_(reference, 0.01))
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_clipping_in_the_loop_is_an_error_where_each_batch_is_reduced() -> None:
    model, _, _ = half_a_group(True)
    with pytest.raises(ConfigError, match="gradient of one batch only"):
        clip_grad_norm_(model, 0.01)
    with pytest.raises(ConfigError, match="gradient of one batch only"):
        clip_grad_norm_(model.parameters(), 0.01)


def test_a_scheduler_counts_updates() -> None:
    model, optimizer = made(3, lr=1.0)
    scheduler = follow_updates(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    for x in batches(*[2] * 7):
        train(model, optimizer, [x])
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_hooks_run_once_per_update() -> None:
    model, optimizer = made(2)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    train(model, optimizer, batches(2, 2, 2, 2, 2))
    assert len(seen) == 2


def test_batches_left_over_are_said_when_training_ends(caplog, phalanx_propagates) -> None:
    model, optimizer = made(4)
    train(model, optimizer, batches(2, 2, 2, 2, 2, 2, 2))
    del model, optimizer
    gc.collect()
    assert "the gradients of 3 batches not applied; 4 make one update" in caplog.text


def test_copies_of_a_model_hold_nothing_back() -> None:
    model, optimizer = made(2)
    train(model, optimizer, batches(2))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(batches(2)[0]).sum().backward()
        twin.zero_grad()
        assert all(p.grad is None for p in twin.parameters())
    assert all(p.grad is not None for p in model.parameters())


def test_wrong_counts_are_errors() -> None:
    model, optimizer = made(2)
    with pytest.raises(ConfigError, match="k_steps of at least 1, found 0"):
        accumulate_gradients(optimizer, model, 0)
    with pytest.raises(ConfigError, match="accumulated already"):
        accumulate_gradients(optimizer, model, 2)
    table = px.ps.SparseEmbedding(4)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="rows of a table"):
        accumulate_gradients(optimizer, table, 2)
    with pytest.raises(ConfigError, match="Use bfloat16"):
        LossScale(Scaler()).bind(optimizer)


def test_two_optimizers_of_one_model_hold_their_own_and_reduce_once() -> None:
    px.init()
    model = net()
    quiet = []

    @contextmanager
    def block():
        quiet.append(True)
        yield
        quiet.append(False)

    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    accumulate_gradients(optimizers[0], model, 2, quiet=block)
    accumulate_gradients(optimizers[1], model, 2, quiet=block)
    during = []
    for x in batches(3, 3, 3, 3):
        during.append(quiet[-1])
        model(x).square().sum(1).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    assert during == [True, False, True, False]
    reference = net()
    own = torch.optim.SGD(reference.parameters(), lr=0.1)
    first, second, third, fourth = batches(3, 3, 3, 3)
    train(reference, own, [torch.cat([first, second]), torch.cat([third, fourth])])
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-14)


def test_a_models_zero_grad_empties_what_is_not_merged() -> None:
    px.init()
    model = net()
    body = torch.optim.SGD(model[0].parameters(), lr=0.1)
    accumulate_gradients(body, model, 2)
    head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model(batches(2)[0]).sum().backward()
    body.step()
    head.step()
    model.zero_grad()
    assert model[2].weight.grad is None
    assert model[0].weight.grad is not None


def test_nothing_is_left_of_a_merge_when_its_optimizer_is_gone() -> None:
    model, optimizer = made(4)
    x = batches(2)[0]
    del optimizer
    gc.collect()
    model(x).sum().backward()
    torch.testing.assert_close(model[2].bias.grad, torch.full((2,), 2.0, dtype=torch.float64))
    accumulate_gradients(torch.optim.SGD(model.parameters(), lr=0.1), model, 2)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_checkpoint_within_a_group_holds_its_gradients(tmp_path) -> None:
    strategy = px.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})

    def distributed() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        px.distribute(model, optimizer, strategy=strategy)
        return model, optimizer

    first, second, third = batches(4, 2, 4)
    model, optimizer = distributed()
    train(model, optimizer, [first])
    px.save(tmp_path, model, optimizer)
    train(model, optimizer, [second])
    again, its_optimizer = distributed()
    px.load(tmp_path, again, its_optimizer)
    train(again, its_optimizer, [second])
    for found, wanted in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted)
    assert not torch.equal(again[0].weight, net()[0].weight)
    px.save(tmp_path / "between", model, optimizer)
    train(again, its_optimizer, [third])
    px.load(tmp_path / "between", again, its_optimizer)
    for one, its in ((model, optimizer), (again, its_optimizer)):
        train(one, its, [third])
    assert torch.equal(again[0].weight.grad, model[0].weight.grad)


def half_a_group(
    reduces_batches: bool, is_sum: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, AccumulatedGradients]:
    """Return a net after one of two batches of an update."""
    px.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    merge = accumulate_gradients(optimizer, model, 2, reduces_batches=reduces_batches)
    train(model, optimizer, batches(4))
    return model, optimizer, AccumulatedGradients(optimizer, merge, is_sharded=False, is_sum=is_sum)


@pytest.mark.parametrize("reduces_batches", [True, False])
def test_what_is_reduced_goes_on_in_any_job(reduces_batches: bool) -> None:
    model, optimizer, saved = half_a_group(True)
    other, its_optimizer, loaded = half_a_group(reduces_batches)
    loaded.load_state_dict(saved.state_dict())
    train(model, optimizer, batches(3, 2)[1:])
    train(other, its_optimizer, batches(3, 2)[1:])
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), net().parameters(), strict=True))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("is_reduced", "reason"), [(False, "those of its ranks"), (True, "a sum over its ranks")])
def test_gradients_that_cannot_be_added_to_are_not_taken(caplog, is_reduced: bool, reason: str) -> None:
    _, _, saved = half_a_group(is_reduced)
    model, optimizer, loaded = half_a_group(not is_reduced, is_sum=True)
    loaded.load_state_dict(saved.state_dict())
    assert f"has gradients of 1 batches that are {reason}" in caplog.text
    train(model, optimizer, batches(4, 2))
    other, its_optimizer = made(2)
    train(other, its_optimizer, batches(4, 2))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
