"""Wrappers and loops of others around a distributed model: exact, or refused on all ranks before the first update."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx as px
from phalanx import fleet
from phalanx.comm.context import BatchShare
from phalanx.errors import ConfigError
from phalanx.parallel.session import applied_to
from ranks import run_ranks

pytestmark = pytest.mark.dist

F64 = torch.float64
X = torch.randn(16, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(16, 3, dtype=F64, generator=torch.Generator().manual_seed(2))


def net(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4, dtype=F64), nn.Tanh(), nn.Linear(4, outputs, dtype=F64))


def sgd(model: nn.Module, **settings) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def mine(rows: torch.Tensor) -> torch.Tensor:
    return rows[px.current().rank :: px.current().world_size]


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def assert_untouched(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def forget() -> None:
    """Let another strategy follow."""
    gc.collect()
    gc.collect()


def wrappers_of_torch():
    px.init()
    for wrapped in (DistributedDataParallel(net()), nn.DataParallel(net()), nn.Sequential(nn.DataParallel(net()))):
        with pytest.raises(ConfigError, match=r"wrapped in D\w+Parallel, which distributes it by itself"):
            px.distribute(wrapped)
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(ConfigError, match="wrapped in fully_shard"):
        px.distribute(fully_shard(net()))
    for graph in (False, True):
        model, _, _ = px.distribute(net(), strategy=px.DistributedStrategy(graph=graph))
        outer = DistributedDataParallel(model)
        with pytest.raises(ConfigError, match="wrapped in DistributedDataParallel afterwards"):
            outer(mine(X))
        inner = DistributedDataParallel(copy.deepcopy(net()))
        inner(mine(X)).mean().backward()
        model(mine(X)).mean().backward()
        del model, outer
        forget()


def test_a_wrapper_that_averages_gradients_too_is_refused_inside_and_around_a_distributed_model():
    run_ranks(wrappers_of_torch, 2, timeout_s=120)


def new_parts_and_optimizers():
    px.init()
    model, before = net(), net()
    px.distribute(model, sgd(model))
    model[2] = nn.Linear(4, 2, dtype=F64)
    optimizers = sgd(model), torch.optim.SGD(model[2].parameters(), 0.1)
    model(mine(X)).square().mean().backward()
    for optimizer in optimizers:
        with pytest.raises(ConfigError, match=r"'2\.weight' \(and those of 1 others\) is not averaged"):
            optimizer.step()
    assert_untouched(model[0], before[0])

    model = net()
    optimizer = sgd(model)
    px.distribute(model, optimizer)
    model(mine(X)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[2] = nn.Linear(4, 3, dtype=F64)
    optimizer.param_groups[0]["params"][-2:] = list(model[2].parameters())
    model(mine(X)).square().mean().backward()
    with pytest.raises(ConfigError, match=r"'2\.weight' .* is not averaged"):
        optimizer.step()

    beside = nn.Linear(2, 1)  # trained on this rank alone, and nobody's business
    own = sgd(beside)
    beside(torch.ones(1, 2)).sum().backward()
    own.step()


def test_a_layer_exchanged_after_distribute_is_refused_in_any_optimizer():
    run_ranks(new_parts_and_optimizers, 2)


def steps_inside_backward():
    px.init()
    model, before = net(), net()
    px.distribute(model)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p], 0.1).step())
    with pytest.raises(ConfigError, match=r"SGD\.step\(\) was called inside a backward pass"):
        model(mine(X)).square().mean().backward()
    assert_untouched(model, before)


def a_graph_of_gradients():
    px.init()
    model = net()
    px.distribute(model)
    with pytest.raises(ConfigError, match="create_graph=True came to a distributed model"):
        model(mine(X)).square().mean().backward(create_graph=True)


def test_loops_that_use_gradients_before_all_ranks_have_added_theirs_are_refused():
    run_ranks(steps_inside_backward, 2)
    run_ranks(a_graph_of_gradients, 2)


def tables_that_depend_on_the_batch():
    px.init()
    with pytest.raises(ConfigError, match=r"'0' has max_norm=1\.0, which scales the rows that are looked up"):
        px.distribute(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)))
    with pytest.raises(ConfigError, match="'0' has scale_grad_by_freq"):
        px.distribute(nn.Sequential(nn.EmbeddingBag(4, 2, scale_grad_by_freq=True)))


def optimizers_of_other_models():
    fleet.init()
    model, other = net(), net()
    for pair in (lambda: px.distribute(model, sgd(other)), lambda: px.train_step(model, F.mse_loss, sgd(other))):
        with pytest.raises(ConfigError, match="the optimizer holds no parameter of the Sequential, so nothing"):
            pair()
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(sgd(copy.deepcopy(model)))
    model(mine(X)).sum().backward()
    with pytest.raises(ConfigError, match="holds no parameter of a distributed model, so its steps train nothing"):
        optimizer.step()
    nets = [fleet.distributed_model(net()) for _ in range(2)]  # as a generator and its critic are
    optimizers = [fleet.distributed_optimizer(sgd(model)) for model in nets]
    for model, optimizer in zip(nets, optimizers, strict=True):
        model(mine(X)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("n", [1, 2])
def test_an_optimizer_that_trains_nothing_is_refused(n: int):
    run_ranks(optimizers_of_other_models, n)


def matrix_optimizers_on_slices():
    px.init()
    torch.manual_seed(0)
    model = px.shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), {"0": "column", "2": "row"})
    strategy = px.DistributedStrategy(tensor_parallel=True, tensor_parallel_configs={"tensor_parallel_degree": 2})
    px.distribute(model, strategy=strategy)
    weights = [param for param in model.parameters() if param.dim() > 1]
    for optimizer in (
        torch.optim.Muon(weights),
        torch.optim.Muon(weights, lr=0.0),  # as a warm-up begins
        torch.optim.Adafactor(model.parameters()),
        torch.optim.LBFGS(model.parameters()),
    ):
        with pytest.raises(ConfigError, match=f"{type(optimizer).__name__} computes an update from whole"):
            fleet.distributed_optimizer(optimizer)
    optimizer = fleet.distributed_optimizer(torch.optim.NAdam(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [param.detach().clone() for param in model.parameters()]
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    if px.current().rank:
        model[0].weight.grad.view(-1)[0] = torch.inf
    with pytest.raises(ConfigError, match="GradScaler steps this NAdam, and ranks that hold slices"):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, model.parameters()))


def test_optimizers_and_scalers_that_need_whole_gradients_are_refused_where_ranks_hold_slices():
    run_ranks(matrix_optimizers_on_slices, 2)
    run_ranks(tables_that_depend_on_the_batch, 2)


def line_searches():
    px.init()
    settings = {"lr": 0.5, "max_iter": 8, "line_search_fn": "strong_wolfe"}
    model, expected = net(), net()
    optimizer = torch.optim.LBFGS(model.parameters(), **settings)
    px.distribute(model, optimizer)
    alone = torch.optim.LBFGS(expected.parameters(), **settings)
    calls = [0, 0]

    def closure(number, trained, stepped, x, y):
        def evaluate():
            calls[number] += 1
            stepped.zero_grad()
            loss = F.mse_loss(trained(x), y)
            loss.backward()
            return loss

        return evaluate

    for _ in range(3):
        optimizer.step(closure(0, model, optimizer, mine(X), mine(Y)))
        alone.step(closure(1, expected, alone, X, Y))
    assert calls[0] == calls[1]
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    here = px.current()  # rank 1 only keeps in step, with a batch of which it computes nothing that is defined
    here.batch = BatchShare(rows=2 - 2 * here.rank, global_rows=2)
    value = optimizer.step(lambda: model(mine(X)).square().mean() * (torch.nan if here.rank else 1.0))
    assert value.isfinite()
    here.batch = None

    with pytest.raises(ConfigError, match="LBFGS decides by the loss"):
        torch.optim.LBFGS(model.parameters()).step(lambda: model(mine(X)).sum())


def test_lbfgs_searches_along_the_loss_of_all_rows():
    run_ranks(line_searches, 2)


def surgery():
    """Gradients of a first backward pass are kept, as they are and through views, while a second one runs."""
    px.init()
    for alias in (lambda g: g, lambda g: g.detach(), lambda g: g.view(-1)):
        model, expected = net(), net()
        px.distribute(model)
        for trained, x, y in ((model, mine(X), mine(Y)), (expected, X, Y)):
            for _ in range(2):
                F.mse_loss(trained(x), y).backward()
                first = [alias(p.grad) for p in trained.parameters()]
                trained.zero_grad()
                trained(x).pow(4).mean().backward()
                for param, before in zip(trained.parameters(), first, strict=True):
                    param.grad = param.grad + before.view(param.shape)
                trained(x).square().mean().backward()  # adds up in a tensor of the script's own
                sgd(trained).step()
                trained.zero_grad()
        assert_same(model, expected)


def test_gradients_that_a_script_keeps_survive_the_next_backward_pass():
    run_ranks(surgery, 2)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, dtype=F64), nn.Linear(4, 4, dtype=F64)

    def forward(self, x: torch.Tensor, *, skips: bool) -> torch.Tensor:
        return self.b(x if skips else torch.tanh(self.a(x)))


def towers_in_one_pass():
    rank = px.init().rank
    torch.manual_seed(0)
    expected = [Tower() for _ in range(3)]
    x = torch.randn(2, 3, 4, dtype=F64)

    def loss(towers, number, order):
        outputs = {which: towers[which](x[number], skips=which == number) for which in order}
        return torch.stack([outputs[which] for which in range(3)]).prod(0).mean()

    for order in itertools.permutations(range(3)):
        theirs = copy.deepcopy(expected)
        towers = [px.distribute(tower)[0] for tower in copy.deepcopy(expected)]
        loss(towers, rank, order).backward()
        (sum(loss(theirs, number, order) for number in range(2)) / 2).backward()
        for ours, other in zip(towers, theirs, strict=True):
            for param, reference in zip(ours.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(param.grad, reference.grad, rtol=1e-12, atol=1e-14)


def test_models_distributed_one_by_one_may_be_trained_by_one_pass_that_skips_other_parts_on_each_rank():
    run_ranks(towers_in_one_pass, 2)


def only_the_optimizer_and_a_step(graph: bool):
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(graph=graph))
    torch.manual_seed(px.current().rank)
    model = nn.Linear(5, 3, dtype=F64)
    optimizer = fleet.distributed_optimizer(sgd(model))
    step = px.train_step(model, F.mse_loss, optimizer)
    assert applied_to(model) is not None
    assert step.compiled is graph
    for _ in range(2):
        step(mine(X), mine(Y))
    everyone = [None, None]
    dist.all_gather_object(everyone, [param.tolist() for param in model.parameters()])
    assert everyone[0] == everyone[1]
    if graph:
        assert step.forward_graphs == 1


@pytest.mark.parametrize("graph", [False, True])
def test_a_train_step_distributes_the_model_of_an_optimizer_that_was_handed_over_alone(graph: bool):
    run_ranks(only_the_optimizer_and_a_step, 2, graph, timeout_s=120)


def sharded_states_beside_a_checkpoint():
    """What `extra` of a checkpoint holds of a second optimizer: this rank's slices, as plain tensors."""
    px.init()
    strategy = px.DistributedStrategy(sharding=True, sharding_configs={"stage": 2})
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    px.distribute(model, optimizer, strategy=strategy)

    def step():
        model(mine(X)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [param.full_tensor().detach().clone() for param in model.parameters()]

    step()
    state, weights = copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in model.parameters()]
    expected = step()
    for slices in state["state"].values():
        slices.update({k: v.to_local() for k, v in slices.items() if hasattr(v, "to_local")})
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for param, weight in zip(model.parameters(), weights, strict=True):
            param.copy_(weight)
    assert all(map(torch.equal, step(), expected))
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][:-1]
    with pytest.raises(ConfigError, match=r"'exp_avg' .* has shape \(1, 5\), and this rank's slice \(2, 5\)"):
        optimizer.load_state_dict(state)


def inference_before_training():
    px.init()
    for stage in (1, 3):
        strategy = px.DistributedStrategy(sharding=True, sharding_configs={"stage": stage})
        model, expected = net(), net()
        optimizer = sgd(model)
        px.distribute(model, optimizer, strategy=strategy)
        with torch.inference_mode():
            torch.testing.assert_close(model(X), expected(X))
        model(mine(X)).square().mean().backward()
        optimizer.step()
        expected(X).square().mean().backward()
        sgd(expected).step()
        assert_same(nn.ParameterList([param.full_tensor() for param in model.parameters()]), expected)
        inputs = mine(X).clone().requires_grad_()
        with pytest.raises(ConfigError, match="create_graph=True came to a distributed model"):
            torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        del model, optimizer
        forget()


def test_sharded_training_goes_on_after_slices_are_loaded_and_after_inference():
    run_ranks(sharded_states_beside_a_checkpoint, 2)
    run_ranks(inference_before_training, 2)
