"""A plain `nn.Embedding` that a Plan puts into a table trains as before."""

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.errors import PlanError
from phalanx.plan.value import Axis, OnRanks, ParamRule, Plan, Push, Server, Table

PLAN = Plan(
    mesh=(Axis(name="data", size=1),),
    params=(ParamRule(match="*"), ParamRule(match="0.weight", place=Server(table="words"), update=Push(mode="sync"))),
    tables=(Table(name="words", module="0", dim=3),),
)


def model_of(**settings):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(6, 3, **settings), nn.Linear(3, 1))


def train(model, optimizer):
    for ids in ([0, 1, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0, 3]):
        optimizer.zero_grad()
        model(torch.tensor(ids)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_placed_embedding_trains_as_it_would_have(kind):
    plain, placed = model_of(), model_of()
    optimizers = [kind(m.parameters(), lr=0.1) for m in (plain, placed)]
    px.distribute(placed, optimizers[1], plan=PLAN)
    assert isinstance(placed[0], nn.Embedding)
    assert placed[0].weight.shape == (0, 3)
    for model, optimizer in zip((plain, placed), optimizers, strict=True):
        train(model, optimizer)
    assert list(placed.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(placed.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_values_are_there_before_an_optimizer_is_and_can_be_loaded():
    plain, placed = model_of(), model_of()
    px.distribute(placed, plan=PLAN)
    ids = torch.tensor([[0, 5]])
    assert torch.equal(placed(ids), plain(ids))
    state = {name: value + 1 for name, value in plain.state_dict().items()}
    placed.load_state_dict(state)
    plain.load_state_dict(state)
    other = nn.Linear(1, 1)
    px.distribute(other, torch.optim.SGD([*placed.parameters(), *other.parameters()], lr=0.1))
    assert torch.equal(placed(ids), plain(ids))
    placed.load_state_dict({name: value + 1 for name, value in state.items()})
    assert torch.equal(placed.state_dict()["0.weight"], state["0.weight"] + 1)
    with pytest.raises(IndexError, match="ids run from 0 to 6, but there are 6 rows"):
        placed(torch.tensor([0, 6]))
    assert "0.weight" in placed.load_state_dict({}, strict=False).missing_keys


def test_what_a_table_cannot_do_is_refused():
    with pytest.raises(PlanError, match=r"an nn.Embedding with max_norm in table 'words'"):
        px.distribute(model_of(max_norm=1.0), plan=PLAN)
    wrong = ParamRule(match="1.weight", place=Server(table="words"), update=Push(mode="sync"))
    with pytest.raises(PlanError, match=r"params\[1.weight\].place.table = 'words' for the dense parameter '1.weight'"):
        px.distribute(model_of(), plan=PLAN.model_copy(update={"params": (wrong,)}))
    with pytest.raises(PlanError, match="the Plan has 2 parameter servers, but 0 were launched"):
        px.distribute(model_of(), plan=PLAN.model_copy(update={"servers": 2}))
    two = (*PLAN.params, ParamRule(match="1.*", place=Server(table="dense"), update=Push(mode="async")))
    with pytest.raises(PlanError, match="several ways to push: async, sync"):
        px.distribute(model_of(), plan=PLAN.model_copy(update={"params": two}))
    sparse = nn.Sequential(px.ps.SparseEmbedding(3))
    on_ranks = Plan(mesh=PLAN.mesh, params=(ParamRule(match="*", place=OnRanks()),))
    with pytest.raises(PlanError, match=r"place = ranks for '0.handle', whose rows live in a table"):
        px.distribute(sparse, plan=on_ranks)
