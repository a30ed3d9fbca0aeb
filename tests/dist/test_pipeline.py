"""A model split into stages trains as one process does: losses, gradients, parameters and outputs compared."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import ConfigError, PeerLostError, PlanError
from phalanx.parallel.pipeline.rng_streams import draw_base, seed_of
from phalanx.parallel.stateful import saved_state_of
from phalanx.plan.value import Schedule
from pipeline_models import (
    CLASSES,
    DATA_BY_STAGE,
    F1B1,
    FOUR,
    FOUR_STAGES,
    GLUED2,
    GLUED4,
    INTERLEAVED,
    TWO,
    WIDTH,
    ZERO_V,
    Case,
    Glued,
    chain,
    check,
    made,
    trained,
)
from ranks import run_ranks
from tensor_models import BLOCK, Transformer, tokens, whole, whole_loss

pytestmark = pytest.mark.dist


def trained_two() -> dict[str, Any]:
    return {name: trained(case) for name, case in TWO.items()}


def trained_four() -> dict[str, Any]:
    return {name: trained(case) for name, case in FOUR.items()}


def test_every_schedule_on_two_ranks_equals_one_process():
    ranks = run_ranks(trained_two, 2)
    for name, case in TWO.items():
        check([found[name] for found in ranks], case)


def test_copies_of_stages_and_four_stages_equal_one_process():
    ranks = run_ranks(trained_four, 4)
    for name, case in FOUR.items():
        check([found[name] for found in ranks], case)


def errors() -> dict[str, str]:
    px.init()
    case = TWO["glue"]
    model, optimizer, (inputs, target) = made(case)
    px.distribute(model, optimizer, plan=case.plan())
    step = px.train_step(model, F.cross_entropy, optimizer)
    calls: dict[str, Callable[[], Any]] = {
        "loop": lambda: F.cross_entropy(model(inputs), target).backward(),
        "copy": lambda: copy.deepcopy(model),
        "by name": lambda: model.eval()(x=inputs, mask=inputs),
        "inputs": lambda: model.eval()(inputs, inputs),
        "rows": lambda: step(inputs, target[:5]),
        "numbers": lambda: step(inputs, 3.0 * torch.ones(())),
        "nothing": lambda: step(inputs[:0], target[:0]),
    }
    plans = {
        "shared": (Tied, case_of(Tied, {"first": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "head": 1})),
        "order": (Glued, case_of(Glued, GLUED2 | {"first": 1, "head": 0})),
        "values": (LooksAtValues, case_of(LooksAtValues, {"0": 0, "1": 1})),
        "unit": (Glued, case_of(Glued, GLUED2 | {"haed": 1})),
        "stages": (Glued, case_of(Glued, GLUED4)),
        "kind": (Glued, replace(case_of(Glued, GLUED4), schedule=Schedule(kind="gpipe", virtual=2))),
    }
    found = {}
    for name, call in calls.items():
        model.train()
        with pytest.raises(ConfigError) as error:
            call()
        found[name] = str(error.value)
    for name, (build, broken) in plans.items():
        with pytest.raises(PlanError) as refused:
            px.distribute(build().double(), plan=broken.plan())
        found[name] = str(refused.value)
    found["other rows"] = other_rows()
    other = HandsOn().double()
    px.distribute(other, plan=case_of(HandsOn, {"0": 0, "1": 1}).plan())
    with pytest.raises((PlanError, PeerLostError)) as late, torch.no_grad():
        other(inputs)
    return found | {"object": str(late.value)}


def other_rows() -> str:
    """Train stages on rows that differ."""
    model, optimizer, (inputs, target) = made(TWO["glue"])
    px.distribute(model, optimizer, plan=TWO["glue"].plan())
    step = px.train_step(model, F.cross_entropy, optimizer)
    with pytest.raises(ConfigError) as error:
        step(inputs + px.current().rank, target)
    return str(error.value)


def case_of(build: type[nn.Module], stages: dict[str, int]) -> Case:
    return Case(build, stages, F1B1)


class Tied(Glued):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight = self.blocks[0].weight


class LooksAtValues(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        return self[1](x if x.sum() > 0 else -x)


class Pair:
    """Nothing that can travel."""


class Odd(nn.Linear):
    def forward(self, x: Any) -> Any:
        return Pair() if isinstance(x, Tensor) else super().forward(torch.zeros(2, WIDTH).double())


class HandsOn(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Odd(WIDTH, WIDTH), Odd(WIDTH, CLASSES))


def test_what_a_pipeline_cannot_do_is_one_error_on_all_ranks():
    ranks = run_ranks(errors, 2)
    assert "and tuples, lists and dicts of them, found Pair" in ranks[0]["object"]
    assert "lost rank 0" in ranks[1]["object"] or "lost another rank" in ranks[1]["object"]
    for found in ranks:
        assert re.match(
            r"training Glued, which is split into stages, needs px.train_step: step = px.train_step", found["loop"]
        )
        assert "cannot be copied or pickled whole. Keep its state_dict" in found["copy"]
        assert "the pipeline of Glued takes x, the inputs without a default; found x, mask" in found["by name"]
        assert "takes 1 inputs, those without a default; found 2" in found["inputs"]
        assert "cuts batches by rows, along dim 0 of inputs and targets; found sizes [(5,), (24,)]" in found["rows"]
        assert "found sizes [(), (24,)]" in found["numbers"]
        assert "found sizes [(0,)]. Give all tensors of a batch the same rows, at least one" in found["nothing"]
        assert "ranks along axis 'stage' hold the model together and must read the same rows" in found["other rows"]
        assert re.match(
            r"'blocks.0.weight' of stage 0 and 'blocks.2.weight' of stage 1 are one parameter", found["shared"]
        )
        assert re.match(r"the forward pass uses 'blocks.0' of stage 0 while it is in stage 1", found["order"])
        assert re.match(r"the forward pass of LooksAtValues cannot be split into stages, because", found["values"])
        assert "modules[haed].stage: the model has no such module. Did you mean 'head'?" in found["unit"]
        assert "2 ranks with 1 each need stages 0 to 1" in found["stages"]
        assert "the schedule 'gpipe' with virtual=2 stages of each rank" in found["kind"]


class Shares(Glued):
    """Two layers of one stage share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight = self.blocks[0].weight


def thawed(model: nn.Module, step: Callable[[Tensor, Tensor], Tensor], data: tuple[Tensor, Tensor]) -> list[float]:
    """Train with the first stage frozen, then with all of it."""
    model.blocks.requires_grad_(False)
    losses = [step(*data).item()]
    model.blocks.requires_grad_(True)
    return losses + [step(*data).item() for _ in range(3)]


def changes() -> dict[str, Any]:
    """Change what is trained, then continue after a loss that raised, which only the last stage computes."""
    px.init()
    case = case_of(Shares, GLUED2)
    model, optimizer, data = made(case)
    px.distribute(model, optimizer, plan=case.plan())
    step = px.train_step(model, F.cross_entropy, optimizer)
    losses = thawed(model, lambda inputs, target: step(inputs, target).loss, data)
    failing = px.train_step(model, no_loss, optimizer)
    with pytest.raises((ZeroDivisionError, PeerLostError)):
        failing(*data)
    with pytest.raises(ConfigError, match="an error ended a step halfway, and the other stages still wait"):
        step(*data)
    return {"losses": losses, "names": [name for name, _ in model.named_parameters()]}


def no_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ZeroDivisionError


def test_what_is_trained_may_change_and_an_error_halfway_is_not_passed_over():
    model, optimizer, data = made(case_of(Shares, GLUED2))

    def step(inputs: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    expected = thawed(model, step, data)
    for found in run_ranks(changes, 2):
        assert found["losses"] == pytest.approx(expected, abs=1e-12)
        assert found["names"] == [name for name, _ in model.named_parameters()]


def by_strategy(
    settings: dict[str, Any], folder: str | None = None, build: Callable[[], nn.Module] = chain
) -> dict[str, Any]:
    torch.manual_seed(px.init().rank)  # rank 0's parameters count
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same = px.fleet.distributed_optimizer(optimizer)
    strategy = px.DistributedStrategy(**settings)
    data = torch.utils.data.TensorDataset(*made(TWO["gpipe"])[2])
    model, _, loader = px.distribute(model.double(), None, data, global_batch=8, strategy=strategy, shuffle=False)
    assert same is optimizer
    step = px.train_step(model, F.cross_entropy, optimizer)
    losses = [px.global_mean(step(x, y).loss).item() for x, y in loader]
    held = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
        if not value.is_meta
    }
    if folder is not None:
        px.save(folder, model, optimizer)
    scores = px.evaluate(model, data, ["acc1"], loss_fn=F.cross_entropy, batch_size=5)
    return {"losses": losses, "held": held, "scores": scores, "told": str(px.explain(model))}


def by_strategies() -> dict[str, Any]:
    found = {}
    for name, settings in STRATEGIES.items():
        found[name] = by_strategy(settings)
        gc.collect()  # the next case has another strategy
    return found


STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {"pipeline": True, "pipeline_configs": {"accumulate_steps": 4}},
    "degrees": {
        "hybrid_configs": {"pp_degree": 2},
        "pipeline_configs": {
            "micro_batch_size": 4,
            "schedule_mode": "ZeroBubble",
            "virtual": 2,
            "cuts": ["1", "2", "3"],
        },
        "clip": True,
        "clip_configs": {"norm": 0.1},
    },
    "merged": {
        "pipeline": True,
        "pipeline_configs": {"accumulate_steps": 2, "schedule_mode": "GPipe"},
        "recompute": True,
        "recompute_configs": {"checkpoints": ["2", "3", "5"]},
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 3},
    },
}


SHARDED: dict[str, Any] = {
    "sharding": True,
    "sharding_configs": {"stage": 3},
    "hybrid_configs": {"pp_degree": 2, "sharding_degree": 2},
    "pipeline_configs": {"accumulate_steps": 2, "schedule_mode": "Interleaved", "virtual": 2, "cuts": ["2", "3", "4"]},
    "clip": True,
    "clip_configs": {"norm": 0.1},
}


def layers() -> nn.Module:
    """A chain whose units return no views and change nothing in place, as torch asks of sharded ones."""
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES))


def test_stages_whose_parameters_are_sharded_equal_one_process_and_are_saved_whole(tmp_path: Path):
    expected = by_hand(SHARDED, layers)
    for found in run_ranks(by_strategy, 4, SHARDED, str(tmp_path / "saved"), layers):
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-12)
        assert found["scores"] == pytest.approx(expected["scores"], abs=1e-12)
        for key, value in found["held"].items():
            torch.testing.assert_close(value, expected["parameters"][key], rtol=0, atol=1e-12)
    model = layers().double()
    px.load(str(tmp_path / "saved"), model, torch.optim.SGD(model.parameters(), lr=0.1))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, expected["parameters"][key], rtol=0, atol=1e-12)


def by_hand(settings: dict[str, Any], build: Callable[[], nn.Module] = chain) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = made(TWO["gpipe"])[2]
    merged = settings.get("gradient_merge_configs", {}).get("k_steps", 1)
    losses = []
    for number, (x, y) in enumerate(zip(*(part.split(8) for part in data), strict=True)):
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        (loss / merged).backward()
        if (number + 1) % merged:
            continue
        if "clip" in settings:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_configs"]["norm"])
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        output = model(data[0])
    scores = {
        "acc1": (output.argmax(1) == data[1]).double().mean().item(), "loss": F.cross_entropy(output, data[1]).item()
    }  # fmt: skip
    return {"losses": losses, "parameters": dict(model.state_dict()), "scores": scores}


def test_a_strategy_makes_the_same_pipeline():
    ranks = run_ranks(by_strategies, 2)
    for name, settings in STRATEGIES.items():
        expected = by_hand(settings)
        for found in (rank[name] for rank in ranks):
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-12)
            assert found["scores"] == pytest.approx(expected["scores"], abs=1e-12)
            for key, value in found["held"].items():
                torch.testing.assert_close(value, expected["parameters"][key], rtol=0, atol=1e-12)
        told = ranks[0][name]["told"]
        assert "stage 0 on rank 0 of its axis: 0" in told, told


def dropping() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    drops = [nn.Dropout(0.5) for _ in layers]
    return nn.Sequential(*(part for pair in zip(layers, drops, strict=True) for part in pair), nn.Linear(WIDTH, 3))


DROPPING = {"0": 0, "1": 0, "2": 1, "3": 1, "4": 2, "5": 2, "6": 3}
DROPPED = {
    name: Case(dropping, DROPPING, schedule, rows=rows, mesh=mesh)
    for name, schedule, rows, mesh in (
        ("interleaved", INTERLEAVED, 16, DATA_BY_STAGE),
        ("zero bubble in a v", ZERO_V, 16, DATA_BY_STAGE),
        ("one stage each", F1B1, 8, FOUR_STAGES),
    )
}


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output + torch.rand_like(output), target)


def dropped() -> dict[str, Any]:
    """Train with dropout, every rank with a seed of its own; ranks of one pipeline come to share one."""
    px.init()
    found = {}
    for name, case in DROPPED.items():
        model, optimizer, data = made(case)
        torch.manual_seed(100 + px.current().rank)
        model, optimizer, loader = px.distribute(
            model, optimizer, torch.utils.data.TensorDataset(*data), global_batch=case.rows, shuffle=False,
            plan=case.plan(),
        )  # fmt: skip
        step = px.train_step(model, noisy_loss, optimizer)
        losses = [px.global_mean(step(inputs, target).loss).item() for inputs, target in loader]
        held = {name: value for name, value in model.state_dict().items() if not value.is_meta}
        found[name] = {"losses": losses, "parameters": held, "next": torch.rand(1).item()}
        del model, optimizer, loader, step
        gc.collect()
    return found


def dropped_alone(case: Case) -> dict[str, Any]:
    """Run every copy's micro-batches in turn through stage after stage, each place of a step with its stream."""
    copies = 1 if case.mesh is FOUR_STAGES else 2
    model, optimizer, data = made(case)
    stages = [[model[int(name)] for name, at in DROPPING.items() if at == stage] for stage in range(4)]
    states = [torch.Generator().manual_seed(100 + 2 * one).get_state() for one in range(copies)]
    losses = []
    for inputs, target in zip(*(part.split(case.rows) for part in data), strict=True):
        optimizer.zero_grad()
        total = 0.0
        for one, rows in enumerate(torch.arange(case.rows).chunk(copies)):
            torch.set_rng_state(states[one])
            base = draw_base()
            states[one] = torch.get_rng_state()
            for number, few in enumerate(rows.chunk(4)):
                x = inputs[few]
                for stage, parts in enumerate(stages):
                    torch.manual_seed(seed_of(base, number * 5 + stage))
                    for part in parts:
                        x = part(x)
                torch.manual_seed(seed_of(base, number * 5 + 4))
                loss = noisy_loss(x, target[few]) * (len(few) / case.rows)
                loss.backward()
                total += loss.item()
        losses.append(total)
        optimizer.step()
    last = torch.Generator()
    last.set_state(states[0])
    return {"losses": losses, "parameters": dict(model.state_dict()), "next": torch.rand(1, generator=last).item()}


def test_what_is_dropped_is_that_of_one_process_whatever_the_schedule():
    ranks = run_ranks(dropped, 4)
    for name, case in DROPPED.items():
        with torch.random.fork_rng([]):
            expected = dropped_alone(case)
        assert ranks[0][name]["next"] == expected["next"]
        for found in (rank[name] for rank in ranks):
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-12)
            for key, value in found["parameters"].items():
                torch.testing.assert_close(value, expected["parameters"][key], rtol=0, atol=1e-12)


def in_float16() -> dict[str, Any]:
    """Train in float16 from a scale that overflows in the first steps."""
    px.init()
    model, optimizer, data = made(TWO["gpipe"])
    strategy = px.DistributedStrategy(
        amp=True,
        amp_configs={
            "dtype": "float16", "init_loss_scaling": 1e30, "decr_ratio": 1e-13, "decr_every_n_nan_or_inf": 1
        },
        pipeline=True,
        pipeline_configs={"accumulate_steps": 2},
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(data[0].float(), data[1])
    model, _, loader = px.distribute(model.float(), optimizer, data, global_batch=4, shuffle=False, strategy=strategy)
    step = px.train_step(model, F.cross_entropy, optimizer)
    losses = [step(inputs, target).loss.item() for inputs, target in loader]
    scale = saved_state_of(optimizer)["loss_scale"].source
    return {"losses": losses, "scale": scale.value, "skipped": scale.skipped}


def test_stages_in_float16_skip_the_same_steps_and_train_as_float32_does():
    model, optimizer, data = made(TWO["gpipe"])
    losses = []
    for number, (inputs, target) in enumerate(zip(*(part.split(4) for part in data), strict=True)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        losses.append(loss.item())
        if number > 1:
            optimizer.step()
    for found in run_ranks(in_float16, 2):
        assert (found["scale"], found["skipped"]) == (pytest.approx(1e4), 2)
        assert found["losses"] == pytest.approx(losses, rel=5e-3)


STYLES = BLOCK | {"tokens": "vocab", "head": "column"}


def cut_three_ways() -> dict[str, Any]:
    px.init()
    model, optimizer, data = whole_batches()
    px.shard(model, STYLES)
    model, optimizer, loader = px.distribute(
        model,
        optimizer,
        torch.utils.data.TensorDataset(*data),
        global_batch=10,
        shuffle=False,
        strategy=px.DistributedStrategy(
            hybrid_configs={"dp_degree": 2, "mp_degree": 2, "pp_degree": 2},
            pipeline_configs={"accumulate_steps": 2, "schedule_mode": "ZeroBubble", "cuts": ["norm"]},
        ),
    )
    step = px.train_step(model, whole_loss, optimizer)
    losses = [px.global_mean(step(ids, target).loss).item() for ids, target in loader]
    held = {name: whole(model, name, param) for name, param in model.named_parameters() if not param.is_meta}
    gradients = {name: whole(model, name, model.get_parameter(name).grad) for name in held}
    with torch.no_grad():
        output = model.eval()(data[0][:3])
    return {"losses": losses, "parameters": held, "gradients": gradients, "output": output}


def whole_batches() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Transformer().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), tokens(28)


def test_stages_of_cut_layers_in_copies_equal_one_process():
    model, optimizer, data = whole_batches()
    losses = []
    # Shares of 5 rows are one micro-batch, those of the last 8 rows two.
    for ids, target in zip(*(part.split(10) for part in data), strict=True):
        optimizer.zero_grad()
        loss = whole_loss(model(ids), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        output = model(data[0][:3])
    ranks = run_ranks(cut_three_ways, 8)
    assert {name for found in ranks for name in found["parameters"]} == set(model.state_dict())
    for found in ranks:
        assert found["losses"] == pytest.approx(losses, abs=1e-12)
        torch.testing.assert_close(found["output"], output, rtol=0, atol=1e-12)
        for name, value in found["parameters"].items():
            param = model.get_parameter(name)
            torch.testing.assert_close(value, param.detach(), rtol=0, atol=1e-12)
            torch.testing.assert_close(found["gradients"][name], param.grad, rtol=0, atol=1e-12)


def saved(folder: str) -> dict[str, Any]:
    px.init()
    found = {}
    for name, stages in (("saved", GLUED2), ("loaded", {**GLUED2, "blocks.1": 1})):
        case = case_of(Glued, stages)
        model, optimizer, (inputs, target) = made(case)
        px.distribute(model, optimizer, plan=case.plan())
        step = px.train_step(model, F.cross_entropy, optimizer)
        if name == "loaded":
            px.load(folder, model, optimizer)
        else:
            step(inputs, target)
            px.save(folder, model, optimizer)
        found[name] = step(inputs, target).loss.item()
        del model, optimizer, step
        gc.collect()
    return found


def test_a_checkpoint_of_stages_loads_into_other_stages_and_one_process(tmp_path: Path):
    for found in run_ranks(saved, 2, str(tmp_path / "saved")):
        assert found["saved"] == found["loaded"]
    model, optimizer, (inputs, target) = made(TWO["glue"])
    px.load(str(tmp_path / "saved"), model, optimizer)
    assert F.cross_entropy(model(inputs), target).item() == pytest.approx(found["saved"], abs=1e-12)
    assert len(optimizer.state) == len(list(model.parameters()))
