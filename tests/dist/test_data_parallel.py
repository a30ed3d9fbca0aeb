"""Data parallel equals one process that runs the replicas' batches in turn: gradients compared, SGD."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx.comm.context import BatchShare
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.session import applied_to
from phalanx.plan import Plan
from phalanx.plan.value import Axis, Step
from ranks import run_ranks

pytestmark = pytest.mark.dist

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
ROWS = 22


def small_net(norm: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    normalise = {"batch": nn.BatchNorm2d, "group": lambda c: nn.GroupNorm(2, c)}[norm]
    # No bias before a normalisation: its gradient is zero but for rounding, and cannot be compared.
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), normalise(4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, bias=False), normalise(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5),
    ).to(dtype)  # fmt: skip


def rows_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS, 1, 8, 8, generator=generator).to(dtype)
    return images, torch.randint(5, (ROWS,), generator=generator), torch.arange(ROWS)


def train_distributed(norm: str, dtype: torch.dtype, global_batch: int, graph: bool):
    """Train one epoch on this rank; return per step the rows that counted and the gradients, and the final buffers."""
    torch.manual_seed(100 + px.init().rank)  # other initial weights on every rank: the broadcast must win
    model = small_net(norm, dtype)
    for param in model.parameters():
        param.data.add_(px.current().rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels, index = rows_of(dtype)
    data = torch.utils.data.TensorDataset(images, labels, index)
    model, optimizer, loader = px.distribute(
        model, optimizer, data, global_batch=global_batch, strategy=px.DistributedStrategy(graph=graph), shuffle=True
    )
    history = []
    for image, label, rows in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(image), label).backward()
        counted = rows[: px.current().batch.rows].tolist()
        history.append((counted, {n: p.grad.clone() for n, p in model.named_parameters()}))
        optimizer.step()
    return history, dict(model.named_buffers())


def train_all(cases, graph):
    return {case: train_distributed(*case, graph) for case in cases}


def reference(norm: str, dtype: torch.dtype, steps: list[list[list[int]]]):
    """One process: every step runs the replicas' rows in turn and adds their gradients, weighted by rows."""
    model = small_net(norm, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels, _ = rows_of(dtype)
    for replicas in steps:
        optimizer.zero_grad()
        total = sum(map(len, replicas))
        for rows in replicas:
            if rows:
                (F.cross_entropy(model(images[rows]), labels[rows]) * len(rows) / total).backward()
        yield {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()


EVEN_AND_UNEVEN = [
    (norm, dtype, global_batch)
    for norm in ("group", "batch")
    for dtype in (torch.float32, torch.float64)
    for global_batch in (6, 8)  # 22 rows: 6 leaves 4 for the last step, 8 leaves 6; 8 over 3 ranks is uneven everywhere
]


def assert_equal_to_reference(results, case):
    norm, dtype, _ = case
    ranks = [result[case] for result in results]
    steps = [[history[step][0] for history, _ in ranks] for step in range(len(ranks[0][0]))]
    assert sorted(row for replicas in steps for rows in replicas for row in rows) == list(range(ROWS))
    for step, expected in enumerate(reference(norm, dtype, steps)):
        for history, _ in ranks:
            for name, gradient in history[step][1].items():
                assert (gradient - expected[name]).norm() / expected[name].norm() <= TOLERANCE[dtype], (
                    case,
                    step,
                    name,
                )
    for history, buffers in ranks[1:]:
        for name, gradient in history[-1][1].items():
            assert torch.equal(gradient, ranks[0][0][-1][1][name]), "ranks must agree bit by bit"
        for name, buffer in buffers.items():
            assert torch.equal(buffer, ranks[0][1][name]), name


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_equal_one_process_for_even_and_uneven_batches(world_size):
    results = run_ranks(train_all, world_size, EVEN_AND_UNEVEN, False)
    for case in EVEN_AND_UNEVEN:
        assert_equal_to_reference(results, case)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 3])
def test_compiled_gradients_equal_one_process_too(world_size):
    cases = [("group", torch.float32, 6), ("batch", torch.float32, 8)]
    results = run_ranks(train_all, world_size, cases, True, timeout_s=240)
    for case in cases:
        assert_equal_to_reference(results, case)


class TwoHeads(nn.Module):
    """Which head is used depends on the rank; a third is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(x)).sum()


def use_different_heads():
    rank = px.init().rank
    model, _, _ = px.distribute(TwoHeads())
    x = torch.ones(2, 4) * (rank + 1)
    model(x, rank).backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return gradients, applied_to(model).reducer.unused


def test_a_parameter_unused_on_one_rank_gets_the_others_gradient_and_one_unused_by_all_keeps_none():
    expected = TwoHeads()
    for rank in range(2):
        (expected(torch.ones(2, 4) * (rank + 1), rank) / 2).backward()
    for gradients, unused in run_ranks(use_different_heads, 2):
        assert unused == ("heads.2.bias", "heads.2.weight")
        for name, param in expected.named_parameters():
            if param.grad is None:
                assert gradients[name] is None
            else:
                torch.testing.assert_close(gradients[name], param.grad)


def accumulate():
    rank = px.init().rank
    torch.manual_seed(0)
    model, _, _ = px.distribute(nn.Linear(3, 2, dtype=torch.float64))
    reducer = applied_to(model).reducer
    with px.no_sync(model):
        model(torch.full((2, 3), rank + 1.0, dtype=torch.float64)).square().sum().backward()
    assert reducer.collectives_issued == 0
    local = model.weight.grad.clone()
    model(torch.full((2, 3), rank + 5.0, dtype=torch.float64)).square().sum().backward()
    return local, model.weight.grad.clone(), reducer.collectives_issued


def test_no_sync_accumulates_and_the_next_backward_reduces_the_sum():
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    for value in (1.0, 5.0, 2.0, 6.0):
        (model(torch.full((2, 3), value, dtype=torch.float64)).square().sum() / 2).backward()
    (local0, reduced0, issued), (local1, reduced1, _) = run_ranks(accumulate, 2)
    assert issued == 1
    assert not torch.equal(local0, local1)
    torch.testing.assert_close(reduced0, model.weight.grad, rtol=1e-12, atol=0)
    assert torch.equal(reduced0, reduced1)


def count_collectives():
    from examples.resnet.model import ResNet

    px.init()
    model, _, _ = px.distribute(ResNet(class_dim=102, layers=50))
    keys = list(model.state_dict())
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    return applied_to(model).reducer.collectives_issued, keys == list(ResNet(class_dim=102, layers=50).state_dict())


def test_resnet50_issues_5_collectives_and_keeps_its_keys():
    assert run_ranks(count_collectives, 2) == [(5, True)] * 2


def sum_instead_of_mean():
    px.init()
    torch.manual_seed(0)
    strategy = px.DistributedStrategy(gradient_scale_configs={"scale_strategy": "sum"})
    model, _, _ = px.distribute(nn.Linear(2, 1), strategy=strategy)
    model(torch.ones(1, 2)).sum().backward()
    return model.weight.grad.tolist()


def test_gradients_are_summed_when_asked():
    assert run_ranks(sum_instead_of_mean, 2) == [[[2.0, 2.0]]] * 2


def different_models():
    rank = px.init().rank
    px.distribute(nn.Linear(2, 3 + rank))


def test_ranks_with_different_models_all_fail_and_name_the_parameter():
    for outcome in run_ranks(different_models, 2, expect_failure=True):
        assert "ConfigError" in outcome.error_type
        assert "model.bias" in outcome.message


def plans_that_do_not_fit():
    px.init()
    messages = []
    for plan in (
        Plan(mesh=(Axis(name="data", size=4),), step=Step(batch_axes=("data",))),
        Plan(model_digest="0" * 16, mesh=(Axis(name="data", size=2),), step=Step(batch_axes=("data",))),
        Plan(mesh=(Axis(name="data", size=2),)),
    ):
        with pytest.raises(PlanError) as error:
            px.apply(plan, nn.Linear(2, 2))
        messages.append(str(error.value))
    with pytest.raises(PlanError, match="sparse=False"):
        px.distribute(nn.Embedding(4, 2, sparse=True))
    return messages


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_wrapped():
    for messages in run_ranks(plans_that_do_not_fit, 2):
        assert "needs 4 ranks, but 2 were launched" in messages[0]
        assert "made for another model" in messages[1]
        assert "plan.step.batch_axes = (): every rank would compute the same" in messages[2]


def pickled_and_copied():
    px.init()
    model = px.DataParallel(nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    assert model.scale_loss(loss) is loss
    loss.backward()
    model.apply_collective_grads()
    return list(copy.deepcopy(model.state_dict())), type(model).__name__


def test_the_basic_api_returns_the_same_module_and_its_old_calls_are_harmless():
    assert run_ranks(pickled_and_copied, 2) == [(["weight", "bias"], "Linear")] * 2


def weights_of_a_padded_batch():
    context = px.init()
    torch.manual_seed(0)
    model, _, _ = px.distribute(nn.Linear(2, 1))
    context.batch = BatchShare(rows=3 if context.rank == 0 else 0, global_rows=3)
    x = torch.full((3, 2), 1.0) if context.rank == 0 else torch.full((1, 2), float("nan"))
    model(x).mean().backward()
    return model.weight.grad.tolist()


def test_a_rank_without_rows_adds_nothing_whatever_its_padding_gives():
    assert run_ranks(weights_of_a_padded_batch, 2) == [[[1.0, 1.0]]] * 2


def one_process():
    model, optimizer, loader = px.distribute(
        nn.Linear(2, 1), None, torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4)), global_batch=2
    )
    assert optimizer is None
    assert len(loader) == 2
    with px.no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match="already"):
        px.distribute(model)
    return applied_to(model).reducer is None


def test_one_process_takes_the_same_path():
    assert run_ranks(one_process, 1) == [True]
