"""Every Plan of a planner trains like one process, and AUTO_PARALLEL finds one on the ranks themselves."""

from __future__ import annotations

import gc
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import phalanx as px
from phalanx import fleet
from phalanx.auto.planner.report.traffic import count_traffic
from phalanx.comm.shared_memory.process_group import SharedMemoryGroup
from phalanx.data import Pipeline
from phalanx.errors import ConfigError
from phalanx.parallel.session import applied_to, session
from phalanx.plan.files import load_plan
from phalanx.plan.value import Plan
from ranks import run_ranks
from tensor_models import Case, Transformer, difference, made, tokens, trained, trained_alone, whole_loss

pytestmark = pytest.mark.dist

ROWS, CLASSES = 8, 6


class Hybrid(nn.Module):
    """A convolution, and linear layers that hold far more: AlexNet, tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.classifier = nn.Sequential(
            nn.Linear(36, 48), nn.ReLU(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, CLASSES)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


class LeNet(nn.Sequential):
    """LeNet-5 for small images."""

    def __init__(self) -> None:
        features = [nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 3), nn.Tanh()]
        super().__init__(*features, nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, CLASSES))


class Blocks(nn.Module):
    """Two blocks of a transformer, which may be computed again."""

    def __init__(self) -> None:
        super().__init__()
        first, second = Transformer(), Transformer()
        self.tokens, self.head = first.tokens, first.head
        self.blocks = nn.Sequential(first.block, second.block)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(ids)))


def images(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, 8, 8, generator=generator).double(), torch.arange(rows) % CLASSES


MODELS: dict[str, tuple[Any, Any]] = {"hybrid": (Hybrid, images), "transformer": (Blocks, tokens)}

LIMITS: dict[str, list[tuple[str, ...]]] = {
    "hybrid": [
        ("tp=2", "classifier.0=column", "classifier.2=row", "classifier.4=column"),
        ("zero=3",),
        (),
        ("tp=1", "zero=0", "classifier.0=column", "classifier.2=row"),
        ("zero=1",),
    ],
    "transformer": [
        ("tp=2", "blocks.0.q=column", "blocks.0.mlp.0=column", "tokens=vocab"),
        ("zero=2", "recompute=full"),
        (),
        ("tp=1", "zero=0", "blocks.0.mlp.0=row", "head=column"),
        ("recompute=selective",),
    ],
}


BYTES = {name: sum(param.nbytes for param in build().double().parameters()) for name, (build, _) in MODELS.items()}
"""Of all parameters."""


@cache
def plans(name: str, ranks: int, searches: int) -> dict[str, Plan]:
    """Return the Plans of several searches by what they say of themselves, each once."""
    build, make = MODELS[name]
    found: dict[str, Plan] = {}
    for limits in LIMITS[name][:searches]:
        torch.manual_seed(0)
        answer = px.auto_parallel(
            build().double(),
            make(ROWS),
            whole_loss,
            cluster=f"cpux{ranks}",
            optimizer="momentum",
            limits=("pp=1", *limits),  # a loop of one's own takes no stages
            top_k=3,
        )
        for plan, one in zip(answer.top_k, answer.search.top_k, strict=True):
            found.setdefault(
                f"{one.config} {sorted(f'{path} {way}' for path, way in one.sharded_layers.items())}", plan
            )
    return found


def case_of(name: str, plan: Plan | None = None) -> Case:
    build, make = MODELS[name]
    return Case(build=build, styles={}, options={}, batch=(make, ROWS), plan=plan)


def of_plans(named: dict[str, dict[str, Plan]]) -> dict[str, float]:
    """Return by how much training under each Plan differs from training in one process."""
    px.init()
    found = {}
    for name, several in named.items():
        alone = trained_alone(case_of(name))
        for told, plan in several.items():
            found[f"{name}: {told}"] = difference(trained(case_of(name, plan)), alone)
    return found


@pytest.mark.parametrize(
    ("ranks", "searches", "variety"),
    [
        (2, 5, ("model=2", "zero=1", "zero=2", "zero=3", "recompute=full", "recompute=selective", "row", "column")),
        (4, 2, ("data=2 model=2", "data=4 model=1 zero=3", "zero=2 recompute=full", "row from cut", "vocab")),
    ],
)
def test_every_plan_trains_like_one_process(ranks: int, searches: int, variety: tuple[str, ...]) -> None:
    named = {name: plans(name, ranks, searches) for name in MODELS}
    told = " ".join(words for several in named.values() for words in several)
    assert [words for words in variety if words not in told] == []
    for found in run_ranks(of_plans, ranks, named, timeout_s=120):
        assert {words: apart for words, apart in found.items() if not apart < 1e-10} == {}


class Refuses(nn.Linear):
    """A net that cannot be captured; only rank 0 tries."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("only real numbers here")


class Losses(px.Callback):
    needs_every_step = True

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, run: Any) -> None:
        self.seen.append(run.global_loss())


def model_of(net: nn.Module, **settings: Any) -> px.Model:
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    return px.Model(net, nn.CrossEntropyLoss(), optimizer, ["acc1"], **settings)


def of_fleet(data: tuple[Tensor, Tensor]) -> list[float]:
    """Train through Fleet's verbs, with a Plan that every rank finds by itself."""
    torch.manual_seed(0)
    net, losses = Hybrid(), []
    sample = tuple(column[:ROWS] for column in data)
    plan = px.auto_parallel(
        net,
        sample,
        F.cross_entropy,
        cluster=f"cpux{fleet.worker_num()}",
        limits=["pp=1", "zero=1"] if fleet.worker_num() > 1 else [],
    ).plan
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.05))
    net = fleet.distributed_model(net, plan=plan)
    for inputs, target in px.data.ShardedLoader(data, global_batch=ROWS, seed=0):
        loss = F.cross_entropy(net(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(px.global_mean(loss).item())
    del net, optimizer
    session.reset()
    gc.collect()
    return losses


def of_given(plan: Plan | None) -> list[float]:
    """Train as a Plan says that was made elsewhere."""
    torch.manual_seed(0)
    net, losses = Hybrid().double(), Losses()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    px.Model(net, whole_loss, optimizer, plan=plan).train(1, images(24), losses, global_batch=ROWS, shuffle=False)
    del net, optimizer
    session.reset()
    gc.collect()
    return losses.seen


def of_model(folder: str, given: list[Plan]) -> dict[str, Any]:
    """Train twice: on rows in an order drawn here, and on a pipeline that draws random numbers."""
    px.init()
    found: dict[str, Any] = {"given": [of_given(plan) for plan in given or [None]]}
    px.reset_auto_parallel_context()
    px.set_auto_parallel_context(
        parallel_mode="auto_parallel",
        auto_parallel_search_mode="dynamic_programming",
        strategy_ckpt_save_file=f"{folder}/plan.json",
    )
    pixels, labels = images(30)
    noisy = Pipeline((pixels.float(), labels), columns=("image", "label"))
    noisy = noisy.map(lambda image: image + torch.randn(image.shape) / 10, "image").shuffle(30)
    for name, data in (("rows", (pixels.float(), labels)), ("noisy", noisy)):
        torch.manual_seed(0)
        net, losses = px.shard(Hybrid(), {"classifier.0": "column"}), Losses()
        model = model_of(net)
        model.train(2, data, losses, global_batch=ROWS)
        found[name] = losses.seen
        found[f"{name} evaluated"] = model.eval((pixels.float(), labels))["loss"]
        found[f"{name} drawn"] = torch.rand(()).item()
        found[f"{name} plan"] = applied_to(net).plan.digest()
        del model, net
        session.reset()
        gc.collect()
    found["fleet"] = of_fleet((pixels.float(), labels))
    if px.current().world_size > 1:
        with pytest.raises(ConfigError) as caught:
            model_of(Refuses(4, 2)).train(1, (torch.zeros(8, 4), torch.zeros(8).long()), global_batch=8)
        found["refused"] = str(caught.value)
    return found


@pytest.mark.parametrize("ranks", [2])
def test_a_model_finds_its_plan_and_has_the_losses_of_one_process(ranks: int, tmp_path: Path) -> None:
    nowhere = {"XDG_CACHE_HOME": str(tmp_path)}  # where no measured figures are
    staged = px.auto_parallel(
        Hybrid().double(), images(ROWS), whole_loss, cluster=f"cpux{ranks}", limits=["pp=2"], top_k=3
    ).top_k
    assert len({plan.schedule.microbatches for plan in staged}) > 1
    parts = px.auto_parallel(
        Hybrid().double(), images(ROWS), whole_loss, cluster=f"cpux{ranks}", limits=["tp=2", "features.*=parts"]
    ).plan
    assert parts.ops  # of a step that the ranks have to capture themselves
    (alone,) = run_ranks(of_model, 1, str(tmp_path), [], env=nowhere)
    several = run_ranks(of_model, ranks, str(tmp_path), [*staged, parts], env=nowhere)
    for found in several:
        assert found["given"] == [pytest.approx(alone["given"][0], abs=1e-10)] * (len(staged) + 1)
        for name in ("rows", "noisy"):
            assert found[name] == pytest.approx(alone[name], abs=1e-4)
            assert found[f"{name} evaluated"] == pytest.approx(alone[f"{name} evaluated"], abs=1e-4)
            assert found[f"{name} drawn"] == alone[f"{name} drawn"]
            assert found[f"{name} plan"] == several[0][f"{name} plan"]
        assert found["fleet"] == pytest.approx(alone["fleet"], abs=1e-4)
        assert "only real numbers here" in found["refused"]
    assert any(reason.setting.startswith("planner: data=") for reason in load_plan(tmp_path / "plan.json").because)


EXAMPLES: dict[str, tuple[Any, Any]] = {"lenet": (LeNet, images), **MODELS}


def example_of(name: str) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a net, what trains it, the rows of three steps and others."""
    build, make = EXAMPLES[name]
    torch.manual_seed(0)
    net = build().double()
    rows, others = make(3 * BATCH + 5), slice(3 * BATCH, None)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    return net, optimizer, tuple(part[: 3 * BATCH] for part in rows), tuple(part[others] for part in rows)


BATCH = 16


def of_one_process(name: str) -> dict[str, Any]:
    """Train by hand, and look at other rows before and after."""
    net, optimizer, (inputs, targets), (others, theirs) = example_of(name)
    found: dict[str, Any] = {"before": whole_loss(net(others), theirs).item(), "predicted": net(others).detach()}
    losses = []
    for batch, target in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        loss = whole_loss(net(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {**found, "losses": losses, "after": whole_loss(net(others), theirs).item()}


def of_examples(names: list[str]) -> dict[str, dict[str, Any]]:
    """Train every network with the Plan that is found for it, and look at other rows before and after."""
    px.init()
    found = {}
    for name in names:
        net, optimizer, rows, others = example_of(name)
        if px.current().rank:
            nn.init.zeros_(next(net.parameters()))  # rank 0's count
        model, losses = px.Model(net, whole_loss, optimizer, parallel_mode="AUTO_PARALLEL"), Losses()
        before, predicted = model.eval(others)["loss"], model.predict(others[0])
        assert applied_to(net) is None
        model.train(1, rows, losses, global_batch=BATCH, shuffle=False)
        found[name] = {
            "before": before,
            "predicted": predicted,
            "losses": losses.seen,
            "after": model.eval(others)["loss"],
            "plan": applied_to(net).plan.because[-1].setting,
        }
        del model, net, optimizer
        session.reset()
        gc.collect()
    return found


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(2, ["lenet", "hybrid", "transformer"]), (4, ["lenet", "hybrid", "transformer"]), (8, ["hybrid"])],
)
def test_the_example_networks_train_like_one_process(ranks: int, names: list[str], tmp_path: Path) -> None:
    nowhere = {"XDG_CACHE_HOME": str(tmp_path)}
    several = run_ranks(of_examples, ranks, names, env=nowhere, timeout_s=100)
    for name in names:
        alone = of_one_process(name)
        for found in several:
            told = found[name].pop("plan")
            assert told == several[0][name].setdefault("told", told)
            for what, expected in alone.items():
                torch.testing.assert_close(
                    torch.as_tensor(found[name][what], dtype=torch.float64),
                    torch.as_tensor(expected, dtype=torch.float64),
                    rtol=0,
                    atol=1e-10,
                    msg=lambda said, where=f"{name} on {ranks} ranks, {what}, {told}": f"{where}: {said}",
                )


LISTENED = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "send": ("send", 0),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
}
"""Calls of a group, what kind they are, and which argument is the whole that the kind counts."""

TALK_BYTES = 400
"""Below this, ranks tell each other what they are about to do."""


def listened() -> Counter[tuple[str, float]]:
    """Return what counts this rank's collectives from now on."""
    sent: Counter[tuple[str, float]] = Counter()

    def listen(name: str, kind: str, place: int) -> None:
        called = getattr(SharedMemoryGroup, name)

        def heard(self: Any, *given: Any) -> Any:
            whole = tree_leaves(given[place])
            sent[kind, float(sum(leaf.nbytes for leaf in whole))] += 1
            return called(self, *given)

        setattr(SharedMemoryGroup, name, heard)

    for name, (kind, place) in LISTENED.items():
        listen(name, kind, place)
    return sent


def of_traffic(several: list[tuple[str, Plan]]) -> list[Counter[tuple[str, float]]]:
    """Return the collectives of the second step under each Plan."""
    px.init()
    sent = listened()
    found = []
    for name, plan in several:
        model, optimizer, data = made(case_of(name, plan))
        model, optimizer, loader = px.distribute(
            model, optimizer, TensorDataset(*data), global_batch=ROWS, shuffle=False, plan=plan
        )
        for step, (inputs, target) in enumerate(loader):
            sent.clear()
            whole_loss(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                found.append(Counter(sent))
        del model, optimizer, loader
        session.reset()
        gc.collect()
    return found


def of_staged_traffic(plan: Plan) -> Counter[tuple[str, float]]:
    """Return what this rank's second step through stages exchanges."""
    px.init()
    sent = listened()
    model, optimizer, data = made(case_of("hybrid", plan))
    model, optimizer, loader = px.distribute(
        model, optimizer, TensorDataset(*data), global_batch=ROWS, shuffle=False, plan=plan
    )
    step = px.train_step(model, whole_loss, optimizer)
    for inputs, target in loader:
        before = Counter(sent)
        step(inputs, target)
    return sent - before


def bytes_by_kind(sent: Counter[tuple[str, float]]) -> dict[str, float]:
    found = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"), 0.0)
    for (kind, size), times in sent.items():
        found[kind] += size * times
    return found


@pytest.mark.parametrize("ranks", [2])
def test_what_ranks_exchange_is_what_was_priced(ranks: int) -> None:
    several, priced = [], []
    for name, limits in [
        ("hybrid", ("tp=2", "classifier.0=column", "classifier.2=row")),
        ("hybrid", ("tp=1", "zero=0", "classifier.0=column", "classifier.2=row")),
        ("hybrid", ("zero=3",)),
        ("transformer", ("tp=2", "blocks.0.q=column", "blocks.0.mlp.0=column", "tokens=vocab", "head=whole")),
        ("transformer", ("tp=1", "zero=0", "blocks.0.mlp.0=row", "head=whole")),
        ("transformer", ("zero=2", "recompute=full")),
    ]:
        build, make = MODELS[name]
        answer = px.auto_parallel(
            build().double(), make(ROWS), whole_loss, cluster=f"cpux{ranks}", limits=("pp=1", *limits), top_k=1
        )
        several.append((name, answer.plan))
        priced.append(count_traffic(answer.search.best, answer.work))
    for executed in run_ranks(of_traffic, ranks, several):
        for (name, plan), mine, sent in zip(several, priced, executed, strict=True):
            loud = Counter({one: times for one, times in sent.items() if one[1] >= TALK_BYTES})
            # Gradients share buckets, and units are padded to equal parts: of those the bytes are compared.
            whole = Counter({one: times for one, times in mine.items() if times == round(times)})
            in_layers = {one: times for one, times in whole.items() if TALK_BYTES <= one[1] < 0.5 * BYTES[name]}
            assert {one: loud[one] for one in in_layers} == in_layers, plan.because[-1].setting
            # Buckets carry flags and marks beside gradients, and ranks compare their parameters.
            assert bytes_by_kind(sent) == pytest.approx(bytes_by_kind(mine), rel=0.03, abs=4 * TALK_BYTES)


@pytest.mark.parametrize(("ranks", "limits"), [(2, ("pp=2", "micro=2")), (4, ("pp=2", "dp=2", "zero=0", "micro=2"))])
def test_what_stages_send_and_exchange_is_what_was_priced(ranks: int, limits: tuple[str, ...]) -> None:
    answer = px.auto_parallel(
        Hybrid().double(), images(ROWS), whole_loss, cluster=f"cpux{ranks}", limits=limits, top_k=1
    )
    for rank, sent in enumerate(run_ranks(of_staged_traffic, ranks, answer.plan)):
        mine = count_traffic(answer.search.best, answer.work, stage=rank % 2)
        sends = {one: times for one, times in mine.items() if one[0] == "send"}
        assert sum(sends.values()) == 2, "two micro-batches, forward from one and back from the other"
        assert {one: sent[one] for one in sends} == sends
        loud = Counter({one: times for one, times in sent.items() if one[1] >= TALK_BYTES})
        assert bytes_by_kind(loud) == pytest.approx(bytes_by_kind(mine), rel=0.03, abs=2 * TALK_BYTES)
