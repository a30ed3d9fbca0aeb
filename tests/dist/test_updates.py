"""LocalSGD, deep gradient compression, other wires and synchronised batch norm, each against a small simulator."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel import distribute
from phalanx.parallel.session import applied_to
from phalanx.parallel.update.top_k import TopKCompressor
from phalanx.plan import Plan
from phalanx.plan.value import AllReduce, Average, Axis, ModuleRule, ParamRule, Schedule, Step, TopK, Update
from ranks import run_ranks

pytestmark = pytest.mark.dist

ROWS = 45
BATCH = 9


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 7), nn.BatchNorm1d(7)] if norm else [nn.Linear(6, 7)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(7, 3)).double()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=generator).double(), torch.arange(ROWS) % 3


def shares(step: int, ranks: int) -> list[slice]:
    """Rows of each rank in a step: the first ranks have one more."""
    start, found = step * BATCH, []
    for rank in range(ranks):
        count = BATCH // ranks + (rank < BATCH % ranks)
        found.append(slice(start, start + count))
        start += count
    return found


def plan_for(update: Update, ranks: int, **step: object) -> Plan:
    return Plan(
        mesh=(Axis(name="data", size=ranks),),
        params=(ParamRule(match="*", update=update),),
        step=Step(batch_axes=("data",), **step),
    )


def train(update: Update, ranks: int, momentum: float, decay: float, nesterov: bool = False) -> dict:
    px.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=decay, nesterov=nesterov)
    data = torch.utils.data.TensorDataset(*rows())
    plan = plan_for(update, ranks)
    model, optimizer, loader = px.distribute(model, optimizer, data, global_batch=BATCH, plan=plan, shuffle=False)
    history = []
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        px.report(loss=loss)
        optimizer.step()
        history.append([param.detach().clone() for param in model.parameters()])
    made = applied_to(model)
    return {
        "history": history,
        "averages": [u.averages for u in made.updaters if hasattr(u, "averages")],
        "momentum": optimizer.param_groups[0]["momentum"],
        "sent": [u.sent for u in made.updaters if hasattr(u, "sent")],
        "issued": made.reducer.collectives_issued if made.reducer else 0,
    }


def gradients(model: nn.Module, share: slice, ranks: int) -> tuple[list[torch.Tensor], float]:
    """Gradients of one rank, weighted by its rows so that their mean over ranks is that of the global batch."""
    inputs, target = rows()
    count = share.stop - share.start
    loss = F.cross_entropy(model(inputs[share]), target[share])
    return [g * (count * ranks / BATCH) for g in torch.autograd.grad(loss, list(model.parameters()))], loss.item()


def simulate_local(update: Average, ranks: int, momentum: float, decay: float) -> list[list[list[torch.Tensor]]]:
    """LocalSGD: one model per rank; what every rank holds after each step."""
    models = [net() for _ in range(ranks)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=momentum, weight_decay=decay) for m in models]
    history, last, every, first = [], update.begin_step - 1, update.every, None
    for step in range(1, ROWS // BATCH + 1):
        found = [gradients(m, share, ranks) for m, share in zip(models, shares(step - 1, ranks), strict=True)]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for index, param in enumerate(model.parameters()):
                mean = sum(g[index] for g, _ in found) / ranks
                param.grad = mean if step < update.begin_step else found[rank][0][index]
            optimizer.step()
        if step >= update.begin_step and step - last >= every:
            last = step
            for group in zip(*(m.parameters() for m in models), strict=True):
                mean = torch.stack([p.detach() for p in group]).mean(0)
                for param in group:
                    param.data.copy_(mean)
            if update.adaptive:
                loss = sum(value for _, value in found) / ranks
                first = first or loss
                every = min(max(math.ceil(math.sqrt(loss / first) * update.every), 1), 16)
        history.append([[p.detach().clone() for p in m.parameters()] for m in models])
    return history


def simulate_top_k(update: TopK, ranks: int, momentum: float, decay: float, nesterov: bool) -> list[list[torch.Tensor]]:
    model = net()
    params = list(model.parameters())
    velocity = [[torch.zeros_like(p) for p in params] for _ in range(ranks)]
    waiting = [[torch.zeros_like(p) for p in params] for _ in range(ranks)]
    history = []
    for step in range(ROWS // BATCH):
        since = step - update.rampup_begin_step
        ramp = update.sparsity
        sparsity = ramp[min(since * len(ramp) // update.rampup_steps, len(ramp) - 1)] if since >= 0 else 0.0
        total = [torch.zeros_like(p) for p in params]
        if since == 0:  # what was gathered together is dealt out evenly
            velocity = [[sum(of) / ranks for of in zip(*velocity, strict=True)] for _ in range(ranks)]
        for rank, share in enumerate(shares(step, ranks)):
            for index, gradient in enumerate(gradients(model, share, ranks)[0]):
                param, v = params[index].detach(), velocity[rank][index]
                gradient = gradient + decay * param
                v.mul_(momentum).add_(gradient)
                moved = gradient + momentum * v if nesterov else v.clone()
                if since < 0 or param.numel() < update.dense_below:
                    total[index] += moved
                    continue
                left = waiting[rank][index].add_(moved).view(-1)
                place = left.abs().argsort(descending=True)[: max(1, round(left.numel() * (1 - sparsity)))]
                total[index].view(-1)[place] += left[place]
                left[place] = 0
                v.view(-1)[place] = 0
        for param, moved in zip(params, total, strict=True):
            param.data.sub_(0.1 * moved / ranks)
        history.append([p.detach().clone() for p in params])
    return history


LOCAL = {
    2: [
        (Average(every=2), 2, 0.9, 0.01),
        (Average(every=2, begin_step=3), 2, 0.9, 0.0),
        (Average(every=1, adaptive=True), 2, 0.0, 0.0),
    ],
    3: [(Average(every=1), 3, 0.9, 0.01)],
}
SPARSE = {
    2: [
        (TopK(sparsity=(0.75,), dense_below=1), 2, 0.9, 0.01, False),
        (TopK(sparsity=(0.5, 0.9), rampup_steps=3, rampup_begin_step=1, dense_below=10), 2, 0.9, 0.01, False),
        (TopK(sparsity=(0.75,), dense_below=1), 2, 0.9, 0.0, True),
        (TopK(sparsity=(0.0,), dense_below=1), 2, 0.0, 0.0, False),
    ],
    3: [(TopK(sparsity=(0.75,), dense_below=1), 3, 0.5, 0.0, False)],
}


def train_all(cases: list[tuple]) -> list[dict]:
    return [train(*case) for case in cases]


@pytest.mark.parametrize("ranks", sorted(LOCAL))
def test_ranks_train_apart_and_average_when_they_should(ranks: int) -> None:
    results = run_ranks(train_all, ranks, LOCAL[ranks])
    for index, case in enumerate(LOCAL[ranks]):
        for step, expected in enumerate(simulate_local(*case)):
            for rank in range(ranks):
                for found, wanted in zip(results[rank][index]["history"][step], expected[rank], strict=True):
                    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
    if ranks == 3:
        return
    assert results[0][0]["averages"] == [2]
    assert results[0][1]["issued"] == 2  # one bucket, in the two steps before ranks train apart


def plain_steps(ranks: int) -> list[list[torch.Tensor]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for step in range(ROWS // BATCH):
        found = [gradients(model, share, ranks)[0] for share in shares(step, ranks)]
        for index, param in enumerate(model.parameters()):
            param.grad = sum(g[index] for g in found) / ranks
        optimizer.step()
        history.append([p.detach().clone() for p in model.parameters()])
    return history


@pytest.mark.parametrize("ranks", sorted(SPARSE))
def test_only_the_largest_entries_travel_and_nothing_is_lost(ranks: int) -> None:
    results = run_ranks(train_all, ranks, SPARSE[ranks])
    for index, case in enumerate(SPARSE[ranks]):
        for step, expected in enumerate(simulate_top_k(*case)):
            for rank in range(ranks):
                for found, wanted in zip(results[rank][index]["history"][step], expected, strict=True):
                    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
                for found, first in zip(*(r[index]["history"][step] for r in (results[rank], results[0])), strict=True):
                    assert torch.equal(found, first)
        assert results[0][index]["momentum"] == case[2]
    if ranks == 2:
        # Without sparsity and momentum it is plain SGD.
        for found, wanted in zip(results[0][3]["history"][-1], plain_steps(2)[-1], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
        assert results[0][0]["sent"] == [sum(max(1, round(p.numel() * 0.25)) for p in net().parameters())]


def other_wires() -> dict[str, object]:
    px.init()
    updates = {
        "plain": AllReduce(bucket_bytes=300),
        "hierarchical": AllReduce(bucket_bytes=300, route="hierarchical", host_ranks=2),
        "bfloat16": AllReduce(wire_dtype="bfloat16"),
        "float16": AllReduce(wire_dtype="float16"),
    }
    found: dict[str, object] = {name: train(update, 4, 0.9, 0.0)["history"] for name, update in updates.items()}
    with pytest.raises(PlanError) as uneven:
        px.apply(plan_for(AllReduce(route="hierarchical", host_ranks=3), 4), net())
    return found | {"uneven": str(uneven.value)}


def test_other_wires_carry_the_same_sums_up_to_their_rounding() -> None:
    for rank in run_ranks(other_wires, 4):
        assert "needs hosts of equal size, of 2 ranks or more: found 4 ranks, 3 on this host" in rank["uneven"]
        for name, tolerance in (("hierarchical", 1e-12), ("bfloat16", 2e-2), ("float16", 2e-3)):
            for found, wanted in zip(rank[name][-1], rank["plain"][-1], strict=True):
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        assert not torch.equal(rank["bfloat16"][-1][0], rank["plain"][-1][0])


def synchronised(ranks: int) -> dict[str, object]:
    px.init()
    model = net(norm=True)
    keys = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.utils.data.TensorDataset(*rows())
    plan = plan_for(AllReduce(), ranks, sync_bn=True)
    model, optimizer, loader = px.distribute(model, optimizer, data, global_batch=BATCH, plan=plan, shuffle=False)
    history = []
    for inputs, target in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        history.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(rows()[0])
    state = copy.deepcopy(model.state_dict())
    return {"history": history, "state": state, "same keys": keys == list(state), "out": out}


@pytest.mark.parametrize("ranks", [2, 4])
def test_synchronised_batch_norm_equals_the_whole_batch(ranks: int) -> None:
    model = net(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, target = rows()
    expected = []
    for step in range(ROWS // BATCH):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), target[batch]).backward()
        expected.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.step()
    model.eval()
    for rank in run_ranks(synchronised, ranks, ranks):
        assert rank["same keys"]
        for found, wanted in zip(rank["history"], expected, strict=True):
            for name, gradient in wanted.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(rank["state"][name], value, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(rank["out"], model(inputs), rtol=1e-10, atol=1e-12)


def wrong_settings() -> list[str]:
    px.init()
    messages = []

    def refused(build: Callable[[], object], kind: type[Exception]) -> None:
        with pytest.raises(kind) as error:
            build()
        messages.append(str(error.value))

    model = net()
    adam = torch.optim.Adam(model.parameters())
    refused(lambda: px.distribute(model, adam, plan=plan_for(TopK(sparsity=(0.9,)), 2)), ConfigError)
    quiet = net()
    sgd = torch.optim.SGD(quiet.parameters(), lr=0.1)
    px.distribute(quiet, sgd, plan=plan_for(Average(every=1, adaptive=True), 2))
    quiet(rows()[0]).sum().backward()
    refused(sgd.step, ConfigError)
    gathers = px.shard(net(), {"2": "column"}, axis="data")
    refused(lambda: px.distribute(gathers, strategy=px.DistributedStrategy(dgc=True)), PlanError)
    return messages


def test_what_cannot_be_trained_this_way_is_refused() -> None:
    for sparse, adaptive, gathers in run_ranks(wrong_settings, 2):
        assert "update = top_k for parts to which the gradients of all rows come; a layer that is cut trains" in gathers
        assert "strategy.dgc corrects the momentum of torch.optim.SGD without dampening, found Adam" in sparse
        assert "adaptive_localsgd follows the loss, and no step reported one" in adaptive


def interrupted(_: object, *__: object) -> None:
    raise KeyboardInterrupt


def unusual_steps() -> None:
    rank = px.init().rank
    share = shares(0, 2)[rank]
    everything = TopK(sparsity=(0.0,), dense_below=1)

    def distributed(update: Update, **settings: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
        px.distribute(model, optimizer, plan=plan_for(update, 2))
        return model, optimizer

    def loss_of(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(rows()[0][share]), rows()[1][share])

    # A sum over ranks has the decay of weights once.
    model, optimizer = distributed(everything.model_copy(update={"reduce": "sum"}), weight_decay=0.5)
    loss_of(model).backward()
    optimizer.step()
    expected = net()
    sum(F.cross_entropy(expected(rows()[0][s]), rows()[1][s]) for s in shares(0, 2)).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1, weight_decay=0.5).step()
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)

    # A closure would compute gradients that nothing exchanges.
    with pytest.raises(ConfigError, match="where a closure has not computed them"):
        optimizer.step(lambda: loss_of(model))

    # Momentum is there again after a step that ended half-way.
    model, optimizer = distributed(everything, momentum=0.9)
    loss_of(model).backward()
    hook = optimizer.register_step_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    hook.remove()
    optimizer.step()
    assert optimizer.param_groups[0]["momentum"] == 0.9

    # Each of two optimizers counts its own steps.
    model = net()
    pair = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    px.distribute(model, pair[0], plan=plan_for(TopK(sparsity=(0.5,), rampup_begin_step=2, dense_below=1), 2))
    distribute.add_optimizer(pair[1])
    compressor = applied_to(model).updaters[0]
    for sent in (0, 0, 12):  # half of 21 weights, and 2 of 3 biases
        loss_of(model).backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
        assert compressor.sent == sent

    # A loss that is not finite leaves the distance of averages as it is.
    model, optimizer = distributed(Average(every=2, adaptive=True))
    for loss in (1.0, 1.0, math.nan, math.nan, math.inf, math.inf):
        loss_of(model).backward()
        px.report(loss=torch.tensor(loss))
        optimizer.step()
    assert applied_to(model).updaters[0].every == 2

    # State that is loaded before the optimizer comes.
    saved = applied_to(model).updaters[0].state_dict()
    model, _, _ = px.distribute(net(), plan=plan_for(Average(every=2, begin_step=5), 2))
    local = applied_to(model).updaters[0]
    local.load_state_dict(saved)
    distribute.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert local.state_dict()["steps"] == saved["steps"] == 6


def test_unusual_steps_lose_nothing() -> None:
    run_ranks(unusual_steps, 2)


def staged(ranks: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], None]]:
    """Return a model with compressed gradients, in two stages from 4 ranks on, and how it trains a batch."""
    px.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sizes = {"data": 2, "stage": 2} if ranks == 4 else {"data": ranks}
    stages = tuple(ModuleRule(match=str(i), stage=i // 2) for i in range(3)) if ranks == 4 else ()
    plan = Plan(
        mesh=tuple(Axis(name=name, size=size) for name, size in sizes.items()),
        params=(ParamRule(match="*", update=TopK(sparsity=(0.75,), dense_below=1)),),
        modules=stages,
        schedule=Schedule(kind="1f1b", microbatches=2) if stages else Schedule(),
        step=Step(batch_axes=("data",)),
    )
    px.distribute(model, optimizer, plan=plan)
    step = px.train_step(model, F.cross_entropy, optimizer)
    inputs, target = rows()

    def train_batch(number: int) -> None:
        mine = slice(8 * number + px.current().readers.index, 8 * number + 8, px.current().readers.count)
        step(inputs[mine], target[mine])

    return model, optimizer, train_batch


def waiting(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in applied_to(model).updaters[0].state_dict()["residual"].items()}


def saved_in_stages(folder: str) -> dict:
    model, optimizer, train_batch = staged(4)
    train_batch(0)
    train_batch(1)
    px.save(folder, model, optimizer)
    train_batch(2)
    again, optimizer, train_again = staged(4)
    px.load(folder, again, optimizer)
    train_again(2)
    for mine, loaded in zip(model.parameters(), again.parameters(), strict=True):
        assert mine.is_meta or torch.equal(mine, loaded)
    held = {name for name, param in again.named_parameters() if not param.is_meta}
    assert set(waiting(again)) == held
    assert all(torch.equal(waiting(model)[name], tensor) for name, tensor in waiting(again).items())
    return {"over": applied_to(again).updaters[0].state_dict()["over"]}


def loaded_elsewhere(folder: str) -> dict:
    model, optimizer, train_batch = staged(2)
    px.load(folder, model, optimizer)
    train_batch(2)
    other, _, _ = staged(2)
    compressor = applied_to(other).updaters[0]
    state = compressor.state_dict() | {"over": [[0, 2]], "residual": {"0.weight": torch.ones(7, 6)}}
    compressor.load_state_dict(state)
    return {"residual": compressor.state_dict()["residual"]}


def test_what_waits_of_stages_is_saved_with_them_and_dropped_where_ranks_hold_other_parts(
    tmp_path: Path,
) -> None:
    found = run_ranks(saved_in_stages, 4, str(tmp_path / "saved"))
    assert [rank["over"] for rank in found] == [[[0, 2]], [[1, 3]], [[0, 2]], [[1, 3]]]
    for rank in run_ranks(loaded_elsewhere, 2, str(tmp_path / "saved")):
        assert rank["residual"] == {}


def test_gradients_of_several_dtypes_travel_in_one_order_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {str(d): nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.float64, torch.bfloat16, torch.float32)}
    sent: list[torch.dtype] = []
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda flat, **_: sent.append(flat.dtype))
    compressor = TopKCompressor(params, TopK(sparsity=(0.5,), dense_below=10), dict.fromkeys(params), 2)
    compressor._all_reduce_dense([(param, param.detach()) for param in params.values()])
    assert sent == [param.dtype for param in params.values()]
