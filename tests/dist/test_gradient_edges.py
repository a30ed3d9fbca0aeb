"""Scripts that treat gradients, buffers and parameters in unusual ways still train as one process would."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.errors import ConfigError
from phalanx.parallel.session import applied_to
from ranks import run_ranks

pytestmark = pytest.mark.dist

F64 = torch.float64
SUM = {"gradient_scale_configs": {"scale_strategy": "sum"}}


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, dtype=F64), nn.Tanh(), nn.Linear(4, 2, dtype=F64))


def rows(rank: int, number: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(10 * rank + number))


def assert_same_gradients(model: nn.Module, expected: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if other.grad is not None:
            assert (param.grad - other.grad).norm() <= 1e-12 * other.grad.norm(), name


def expect(model: nn.Module, numbers=(0,), forward=None, share=0.5) -> nn.Module:
    """One process runs both ranks' batches in turn."""
    for rank in range(2):
        for number in numbers:
            ((forward or model)(rows(rank, number)).square().mean() * share).backward()
    return model


def accumulate_in_all_ways():
    rank = px.init().rank
    model, _, _ = px.distribute(small_net())
    loss = model(rows(rank)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same_gradients(model, expect(small_net(), numbers=(0, 0)))

    model.zero_grad(set_to_none=False)
    for number in (1, 2):
        model(rows(rank, number)).square().mean().backward()
    assert_same_gradients(model, expect(small_net(), numbers=(1, 2)))

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm() <= 1.0001e-3


def test_gradients_add_up_over_backward_passes_as_in_one_process():
    run_ranks(accumulate_in_all_ways, 2)


def accumulate_sums():
    rank = px.init().rank
    model, _, _ = px.distribute(small_net(), strategy=px.DistributedStrategy(**SUM))
    with px.no_sync(model):
        model(rows(rank, 0)).square().mean().backward()
    for number in (1, 2):
        model(rows(rank, number)).square().mean().backward()
    assert_same_gradients(model, expect(small_net(), numbers=(0, 1, 2), share=1.0))


def test_summed_gradients_add_up_too():
    run_ranks(accumulate_sums, 2)


def accumulate_for_a_part_the_last_backward_skips():
    """Under no_sync rank 0 alone uses the first layer; the backward that reduces uses it nowhere."""
    rank = px.init().rank
    model, _, _ = px.distribute(small_net())
    with px.no_sync(model):
        (model if rank == 0 else model[2])(rows(0) if rank == 0 else torch.ones(1, 4, dtype=F64)).sum().backward()
    model[2](torch.ones(1, 4, dtype=F64)).sum().backward()
    expected = small_net()
    (expected(rows(0)).sum() / 2).backward()
    for share in (0.5, 1.0):
        (expected[2](torch.ones(1, 4, dtype=F64)).sum() * share).backward()
    assert_same_gradients(model, expected)


def test_a_gradient_accumulated_on_one_rank_only_reaches_the_others():
    run_ranks(accumulate_for_a_part_the_last_backward_skips, 2)


def two_parts_in_turn():
    """A generator and a discriminator in one model, trained by two backward passes over disjoint parameters."""
    rank = px.init().rank
    model, _, _ = px.distribute(nn.ModuleDict({"g": small_net(), "d": nn.Linear(2, 1, dtype=F64)}))
    model["d"](model["g"](rows(rank)).detach()).mean().backward()
    assert all(p.grad is None for p in model["g"].parameters())
    of_d = [p.grad.clone() for p in model["d"].parameters()]
    for param in model["d"].parameters():
        param.requires_grad_(False)
    model["d"](model["g"](rows(rank, 1))).mean().backward()
    for param, before in zip(model["d"].parameters(), of_d, strict=True):
        torch.testing.assert_close(param.grad, before, rtol=1e-15, atol=0)
    everyone = [None, None]
    dist.all_gather_object(everyone, [p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*everyone, strict=True))


def test_two_backward_passes_over_disjoint_parts_keep_the_ranks_together():
    run_ranks(two_parts_in_turn, 2)


def frozen_now_and_then():
    """The optimizer is never handed over, so that backward passes alone can notice."""
    rank = px.init().rank
    model, expected = small_net(), small_net()
    px.distribute(model)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, expected)]
    for number, is_trained in enumerate((True, False, True)):
        for net in (model, expected):
            net[2].requires_grad_(is_trained)
        model(rows(rank, number)).square().mean().backward()
        assert_same_gradients(model, expect(expected, numbers=(number,)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    late = small_net()
    late[0].requires_grad_(False)
    px.distribute(late)
    late(rows(rank)).square().mean().backward()
    late[0].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'0.weight' \(and those of 1 others\) is not averaged.*distribute it with"):
        late(rows(rank)).square().mean().backward()
    late[0].requires_grad_(False)
    late.zero_grad()
    late(rows(rank)).square().mean().backward()  # no rank waits for anything


def test_a_parameter_frozen_later_rests_and_one_that_was_frozen_before_is_refused():
    run_ranks(frozen_now_and_then, 2)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.net, self.use_reentrant = small_net(), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.net[0](x))
        return checkpoint(self.net[2], hidden, use_reentrant=self.use_reentrant)


class CheckpointedTwice(nn.Module):
    """One layer under two re-entrant checkpoints, with another layer's bucket still open."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice = nn.Linear(3, 3, dtype=F64), nn.Linear(3, 3, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.twice, x if x.requires_grad else self.first(x), use_reentrant=True)
        return x


def checkpoints():
    rank = px.init().rank
    for use_reentrant in (False, True):
        model, _, _ = px.distribute(Checkpointed(use_reentrant))
        model(rows(rank)).square().mean().backward()
        assert_same_gradients(model, expect(Checkpointed(use_reentrant)))
        reducer = applied_to(model).reducer
        assert reducer.unused == ()
        if not use_reentrant:
            assert (reducer.steps, reducer.collectives_issued) == (1, 1)
        model(rows(rank)).square().mean().backward()
    model, _, _ = px.distribute(CheckpointedTwice())
    model(rows(rank)).square().mean().backward()
    assert_same_gradients(model, expect(CheckpointedTwice()))


def test_checkpointed_parts_travel_with_the_rest_and_re_entrant_ones_in_rounds_of_their_own():
    outcomes = run_ranks(checkpoints, 2, expect_failure=True)
    assert not [o.message for o in outcomes if o.failed]
    assert not any("grad=None: net" in o.output for o in outcomes)


def one_layer_of_three():
    rank = px.init().rank
    model, _, _ = px.distribute(nn.ModuleDict({name: nn.Linear(3, 3, dtype=F64) for name in "abc"}))
    for used in ("a", "b", "a"):  # two parts in turn, and none of c
        model[used](rows(rank)).mean().backward()
        model.zero_grad()


def test_what_no_rank_uses_is_named_once_the_first_step_is_over():
    for outcome in run_ranks(one_layer_of_three, 2, expect_failure=True):
        assert outcome.output.count("in the first step; they keep grad=None: c.bias, c.weight\n") == 1


class MovingAverage(nn.Module):
    """Assigns a new tensor to its buffer in every forward pass; its table is a cache that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=F64)
        self.register_buffer("average", torch.zeros(3, dtype=F64))
        self.register_buffer("table", torch.zeros(1, dtype=F64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        self.table = torch.zeros(len(self.table) + dist.get_rank(), dtype=F64)
        return y


def buffers_that_are_replaced():
    rank = px.init().rank
    model, _, _ = px.distribute(MovingAverage())
    for number in range(2):
        model(rows(rank, number)).sum().backward()
    average, length = model.average.clone(), len(model.table)
    model.average = torch.zeros(7, dtype=F64)
    with pytest.raises(ConfigError, match=r"buffer 'average' of MovingAverage was float64 \(3,\).*\(7,\) now"):
        model.linear(rows(rank)).sum().backward()
    return average.tolist(), length


def test_a_buffer_that_a_module_assigns_anew_stays_in_step_and_caches_are_left_alone():
    (average0, length0), (average1, length1) = run_ranks(buffers_that_are_replaced, 2)
    assert average0 == average1 != [0.0] * 3
    assert (length0, length1) == (1, 3)


def unusual_memory():
    rank = px.init().rank
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    px.distribute(conv)
    conv(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).square().sum().backward()
    assert conv[0].weight.grad.stride() == conv[0].weight.stride() != (27, 9, 3, 1)

    model = nn.Module()
    model.weight = nn.Parameter(small_net()[0].weight.detach().t())
    model.register_buffer("repeated", torch.full((2, 1), float(rank)).expand(2, 3))
    px.distribute(model)
    assert model.repeated.tolist() == [[0.0] * 3] * 2
    (rows(rank) @ model.weight).sum().backward()
    expected = sum(rows(r).sum(0) for r in range(2))[:, None].expand(3, 4) / 2
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-15)
    assert model.weight.grad.stride() == model.weight.stride() == (1, 3)


def test_channels_last_and_transposed_parameters_keep_their_layout_and_expanded_buffers_are_synced():
    run_ranks(unusual_memory, 2)


class ManyTypes(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.linear = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.tensor([rank]))
        self.register_buffer("mask", torch.tensor([rank == 0]))
        self.register_buffer("turn", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x.bfloat16()).float()).square().mean() + (self.phase * x[0]).abs().sum()


def train_many_types():
    rank = px.init().rank
    model, _, _ = px.distribute(ManyTypes(rank))
    model(torch.arange(12.0).view(4, 3) * (rank + 1)).backward()
    gradients = [p.grad.to(torch.complex64).tolist() for p in model.parameters()]
    return gradients, {n: b.tolist() for n, b in model.named_buffers()}


def test_parameters_and_buffers_of_every_dtype_agree_after_a_step():
    first, second = run_ranks(train_many_types, 2)
    assert first == second
    assert first[1]["count"] == [0]
    assert first[1]["mask"] == [True]


def changed_after_distribute():
    rank = px.init().rank
    model, _, _ = px.distribute(small_net())
    model.float()
    with pytest.raises(ConfigError, match=r"'2\.bias' was float64 .* now. Convert or move the model before"):
        model(rows(rank).float()).sum().backward()


def test_a_model_converted_after_distribute_is_named():
    run_ranks(changed_after_distribute, 2)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("the user's own")


def raise_in_backward():
    rank = px.init().rank
    model, optimizer, _ = px.distribute(net := small_net(), torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="the user's own"):
        model[2](RaisesInBackward.apply(model[0](torch.ones(1, 3, dtype=F64)))).sum().backward()
    with pytest.raises(ConfigError, match="the last backward pass raised an error"):
        optimizer.step()
    with pytest.raises(ConfigError, match=r"'2\.bias' got a second gradient before the first was reduced"):
        model(rows(rank)).sum().backward()


def test_after_an_error_in_backward_neither_a_step_nor_another_backward_goes_on_in_silence():
    run_ranks(raise_in_backward, 2)


def merged(folder: Path, numbers: tuple[int, ...], load: bool, save: bool) -> list[torch.Tensor]:
    """Train on batches of both ranks, each on a rank of its own or one after the other; two make an update."""
    context = px.init()
    strategy = px.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    px.distribute(model, optimizer, strategy=strategy)
    if load:
        px.load(folder, model, optimizer)
    ranks = [context.rank] if context.is_distributed else [0, 1]
    for number in numbers:
        model(torch.cat([rows(rank, number) for rank in ranks])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if save:
        px.save(folder, model, optimizer)
    return [param.detach() for param in model.parameters()]


def test_a_group_of_merged_gradients_goes_on_after_a_checkpoint_on_any_number_of_ranks(tmp_path: Path) -> None:
    expected = merged(tmp_path, (0, 1, 2, 3), load=False, save=False)
    run_ranks(merged, 2, tmp_path, (0, 1, 2), False, True)
    alone = merged(tmp_path, (3,), load=True, save=False)
    for found in (alone, *run_ranks(merged, 2, tmp_path, (3,), True, False)):
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-14)


def recurrent() -> list[torch.Tensor]:
    """A sharded model whose output it reads again, over two merged batches."""
    rank = px.init().rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, dtype=F64), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}, "sharding": dist.is_initialized()}
    px.distribute(model, optimizer, strategy=px.DistributedStrategy(**settings))
    for number in (0, 1):
        ranks = [rank] if dist.is_initialized() else [0, 1]
        model(model(torch.cat([rows(rank, number) for rank in ranks]))).square().mean().backward()
        optimizer.step()
    return [param.full_tensor() if dist.is_initialized() else param.detach() for param in model.parameters()]


def test_merged_gradients_that_pass_a_sharded_model_twice_have_their_weight_once() -> None:
    expected = recurrent()
    for found in run_ranks(recurrent, 2):
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-14)


class HostNumbers(TorchDispatchMode):
    """Counts tensors made of numbers of the host; copied to a card, each lets the host wait for all that runs there."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


def backward_passes_that_copy_nothing_from_the_host():
    here = px.init()
    model = small_net()
    px.distribute(model)
    for step in range(5):  # parameters are compared after the first
        with HostNumbers() as seen:
            model(rows(here.rank, step)).sum().backward()
    assert applied_to(model).reducer.steps == 5
    assert seen.count == 0


def test_the_host_does_not_wait_for_a_card_in_a_backward_pass():
    run_ranks(backward_passes_that_copy_nothing_from_the_host, 2)
