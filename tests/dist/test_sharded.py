"""ZeRO equals one process that runs the ranks' rows in turn; the optimizer stays the same object."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx.errors import ConfigError, PlanError
from phalanx.plan import Plan
from phalanx.plan.value import Axis, ModuleRule, ParamRule, ReduceScatter, Step
from ranks import run_ranks

pytestmark = pytest.mark.dist

ROWS = 27


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh()),
        nn.Sequential(nn.Linear(7, 5), nn.Tanh()),
        nn.Linear(5, 3),
    ).double()  # fmt: skip


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=generator).double(), torch.arange(ROWS) % 3, torch.arange(ROWS)


def plan_for(zero: int, ranks: int, shards: int, reduce: str) -> Plan:
    copies = ranks // shards
    return Plan(
        mesh=(Axis(name="data", size=copies), Axis(name="shard", size=shards)),
        params=(ParamRule(match="*", update=ReduceScatter(zero=zero, along=("shard",), reduce=reduce)),),
        modules=(ModuleRule(match="0", unit=True), ModuleRule(match="1", unit=True)),
        step=Step(batch_axes=("data", "shard")),
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(zero: int, ranks: int, shards: int, reduce: str, optimizer_first: bool) -> tuple:
    torch.manual_seed(100 + px.init().rank)
    model = net()
    for param in model.parameters():
        param.data.add_(px.current().rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    data = torch.utils.data.TensorDataset(*rows())
    plan = plan_for(zero, ranks, shards, reduce)
    if optimizer_first:
        same = px.fleet.distributed_optimizer(optimizer)
        model, _, loader = px.distribute(model, None, data, global_batch=9, plan=plan, shuffle=True)
    else:
        model, same, loader = px.distribute(model, optimizer, data, global_batch=9, plan=plan, shuffle=True)
    assert same is optimizer
    history = []
    for inputs, target, index in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        counted = index[: px.current().batch.rows].tolist()
        history.append((counted, {name: whole(param.grad).clone() for name, param in model.named_parameters()}))
        optimizer.step()
        scheduler.step()
    held = sum(param.to_local().numel() for param in model.parameters())
    state = {name: whole(value) for name, value in model.state_dict().items()}
    return history, state, held, optimizer.param_groups[0]["lr"]


def reference(steps: list[list[list[int]]], reduce: str):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    inputs, target, _ = rows()
    gradients = []
    for replicas in steps:
        optimizer.zero_grad()
        total = sum(map(len, replicas))
        for share in replicas:
            if share:
                weight = 1 if reduce == "sum" else len(share) / total
                (F.cross_entropy(model(inputs[share]), target[share]) * weight).backward()
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.step()
        scheduler.step()
    return gradients, model.state_dict()


CASES = {
    2: [(1, 2, 2, "mean", True), (2, 2, 2, "sum", False), (3, 2, 2, "mean", False)],
    4: [(3, 4, 2, "mean", True)],
}


def train_all(cases: list[tuple]) -> list[tuple]:
    return [train(*case) for case in cases]


@pytest.mark.parametrize("ranks", sorted(CASES))
def test_every_stage_equals_one_process_and_holds_a_part(ranks: int) -> None:
    results = run_ranks(train_all, ranks, CASES[ranks])
    for case, of_ranks in zip(CASES[ranks], zip(*results, strict=True), strict=True):
        _, _, shards, reduce, _ = case
        histories = [history for history, _, _, _ in of_ranks]
        steps = [[counted for counted, _ in step] for step in zip(*histories, strict=True)]
        gradients, parameters = reference(steps, reduce)
        for step, expected in enumerate(gradients):
            for history in histories:
                for name, gradient in expected.items():
                    torch.testing.assert_close(history[step][1][name], gradient, rtol=1e-11, atol=1e-13)
        elements = sum(p.numel() for p in net().parameters())
        for _, state, held, rate in of_ranks:
            assert list(state) == list(parameters)
            assert rate == 0.05 * 0.5 ** len(steps)
            assert held <= elements / shards + sum(1 for _ in net().parameters()) * 7
            for name in dict(net().named_parameters()):
                torch.testing.assert_close(state[name], parameters[name], rtol=1e-11, atol=1e-13)
            for name, value in state.items():
                torch.testing.assert_close(value, of_ranks[0][1][name], rtol=0, atol=0)


def follow_the_parameters() -> list[str]:
    px.init()
    model = net()
    apart = torch.optim.SGD(model.parameters(), lr=0.1)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs, target, _ = rows()
    F.cross_entropy(model(inputs), target).backward()
    adam.step()  # so that there is state to cut
    before = copy.deepcopy(adam.state_dict()["state"])
    model, adam, _ = px.distribute(model, adam, plan=plan_for(3, 2, 2, "mean"))
    for index, state in adam.state_dict()["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(whole(value), before[index][key], rtol=0, atol=0)
    F.cross_entropy(model(inputs), target).backward()
    adam.step()
    with pytest.raises(ConfigError) as unbound:
        apart.step()
    mixed = Plan(
        mesh=(Axis(name="data", size=2),),
        params=(ParamRule(match="*"), ParamRule(match="2.*", update=ReduceScatter(zero=3))),
        step=Step(batch_axes=("data",)),
    )
    with pytest.raises(PlanError) as several:
        px.apply(mixed, net())
    return [str(unbound.value), str(several.value)]


def test_state_follows_and_an_optimizer_that_was_left_behind_is_named() -> None:
    for unbound, several in run_ranks(follow_the_parameters, 2):
        assert "this SGD holds parameter '0.0.weight' as it was before the model was sharded" in unbound
        assert "updates the parameters of one model in several ways (all_reduce, zero=3)" in several


def accumulate() -> dict[str, torch.Tensor]:
    px.init()
    model = nn.Linear(3, 4).double()
    model, _, _ = px.distribute(model, plan=plan_for(3, 2, 2, "mean").model_copy(update={"modules": ()}))
    inputs = torch.arange(12.0, dtype=torch.float64).view(4, 3) + 100 * px.current().rank
    with px.no_sync(model):
        model(inputs[:2]).square().mean().backward()
    model(inputs[2:]).square().mean().backward()
    return {name: whole(param.grad) for name, param in model.named_parameters()} | {
        f"{name} value": whole(param.detach()) for name, param in model.named_parameters()
    }


def test_gradients_accumulate_without_travelling() -> None:
    ranks = run_ranks(accumulate, 2)
    model = nn.Linear(3, 4).double()
    model.load_state_dict({name: ranks[0][f"{name} value"] for name in ("weight", "bias")})
    for rank in range(2):
        inputs = torch.arange(12.0, dtype=torch.float64).view(4, 3) + 100 * rank
        for half in (inputs[:2], inputs[2:]):
            (model(half).square().mean() / 2).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(ranks[1][name], param.grad, rtol=1e-12, atol=0)


def net_changing_views() -> nn.Module:
    """Over sequences the outputs of its linear layers are views, of which one is changed in place."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)).double()


def gradients_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    output = model(rows)
    output += 1  # in place, of the model's own output
    return output.square().sum((1, 2)).mean()


def change_views_in_place(zeros: list[int | None]) -> dict[int | None, dict[str, torch.Tensor]]:
    px.init()
    found = {}
    for zero in zeros:
        plan = None if zero is None else plan_for(zero, 2, 2, "mean")
        model, _, loader = px.distribute(net_changing_views(), None, SEQUENCES, global_batch=5, plan=plan)
        for rows in loader:
            gradients_of(model, rows).backward()
        found[zero] = {name: whole(param.grad) for name, param in model.named_parameters()}
    return found


SEQUENCES = torch.arange(60.0, dtype=torch.float64).sin().view(5, 2, 6)


def test_outputs_over_sequences_may_be_changed_in_place() -> None:
    zeros = [3, 1, None]
    found = run_ranks(change_views_in_place, 2, zeros)[1]
    alone = net_changing_views()
    gradients_of(alone, SEQUENCES).backward()
    for zero in zeros:
        for name, param in alone.named_parameters():
            torch.testing.assert_close(found[zero][name], param.grad, rtol=1e-12, atol=1e-14)


class Twice(nn.Sequential):
    """Changes one of two outputs of its first layer, which lie in the same memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, flat = self[0](x)
        flat.mul_(2)
        return self[1](output)


class Twofold(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = super().forward(x) * 1.0
        return output, output.flatten(1)


def change_what_another_output_sees() -> str:
    px.init()
    net = Twice(Twofold(6, 4), nn.Linear(4, 3))
    model, _, loader = px.distribute(net.double(), None, SEQUENCES, global_batch=5, plan=plan_for(3, 2, 2, "mean"))
    with pytest.warns(UserWarning) as told:
        for rows in loader:
            gradients_of(model, rows).backward()
    return str(told[0].message)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 does not warn of such views")
def test_a_view_of_another_output_is_not_cut_off_from_it() -> None:
    """It would have gradients as if the other had not been changed: torch's warning is what tells."""
    assert all("returned a view tensor" in said for said in run_ranks(change_what_another_output_sees, 2))


class Tied(nn.Module):
    """Returns two outputs of which one is made from the other; two units share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.middle(self.tokens(ids)))
        return self.head(hidden), hidden


def tied() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Tied().double()
    # The four ranks have 3, 2, 2 and 2 rows.
    return model, torch.optim.SGD(model.parameters(), lr=0.5), torch.arange(9) % 7, torch.arange(9) % 3


def both(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[0], target) + outputs[1].square().mean()


def train_tied(settings: dict) -> dict[str, torch.Tensor]:
    px.init()
    bare = nn.Linear(2, 2)
    bare.scale = nn.Parameter(torch.tensor(2.0))
    with pytest.raises(PlanError, match=r"and 'scale' has no dims. Give it shape \(1,\)"):
        px.distribute(bare, strategy=px.DistributedStrategy(**settings))
    model, optimizer, ids, target = tied()
    data = torch.utils.data.TensorDataset(ids, target)
    model, optimizer, loader = px.distribute(
        model, optimizer, data, global_batch=9, shuffle=False, strategy=px.DistributedStrategy(**settings)
    )
    for _ in range(4):
        for inputs, labels in loader:
            both(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: whole(param.detach()) for name, param in model.named_parameters()}


def test_shared_weights_several_outputs_and_any_order_of_axes() -> None:
    settings = {
        "sharding": True,
        "hybrid_configs": {"dp_degree": 2, "sharding_degree": 2, "order": ["sharding", "dp"]},
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 2},
    }
    model, optimizer, ids, target = tied()
    for _ in range(2):
        optimizer.zero_grad()
        both(model(ids), target).backward()
        optimizer.step()
    for found in run_ranks(train_tied, 4, settings):
        assert list(found) == ["tokens.weight", "middle.weight", "middle.bias"]
        for name, param in model.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-12, atol=1e-13)


def looked_at(zero: int) -> list[float]:
    """Evaluate, change the parameters, and evaluate again."""
    px.init()
    model, _, _ = px.distribute(net(), plan=plan_for(zero, 2, 2, "mean"))
    inputs = rows()[0]
    found = []
    for _ in range(2):
        with torch.no_grad():
            found.append(model.eval()(inputs).sum().item())
            for param in model.parameters():
                assert hasattr(param, "full_tensor")
                param.mul_(2.0)
    return found


def test_evaluation_sees_parameters_that_changed_since_the_last() -> None:
    model, inputs = net().eval(), rows()[0]
    with torch.no_grad():
        first = model(inputs).sum().item()
        for param in model.parameters():
            param.mul_(2.0)
        second = model(inputs).sum().item()
    for found in run_ranks(looked_at, 2, 1):
        assert found == pytest.approx([first, second], abs=1e-12)
