"""Nothing drifts unseen: ranks whose parameters come apart are stopped, and what is evaluated or saved is one model."""

from __future__ import annotations

import copy
import io
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import phalanx as px
from phalanx.errors import ConfigError
from phalanx.parallel.session import applied_to
from phalanx.strategy import DistributedStrategy
from ranks import run_ranks

pytestmark = pytest.mark.dist

X = torch.randn(48, 5, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.5, 3, 48)[:, None]
Y = torch.randn(48, 1, generator=torch.Generator().manual_seed(2))


def net(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(4)] if norm else []
    return nn.Sequential(nn.Linear(5, 4), *middle, nn.Tanh(), nn.Linear(4, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def distributed(norm: bool = False, **settings: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    model = net(norm)
    strategy = DistributedStrategy(**settings)
    return px.distribute(model, sgd(model), (X, Y), global_batch=8, shuffle=False, strategy=strategy)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def raised(act: Callable[[], object]) -> str:
    try:
        act()
    except ConfigError as error:
        return str(error)
    return ""


# --- what comes apart -------------------------------------------------------------------------------------------------


def changed_in_the_loop() -> None:
    model, optimizer, loader = distributed()
    train(model, optimizer, loader)
    if px.current().rank:
        nn.init.ones_(model[2].weight)
    train(model, optimizer, loader)


class Clipped(nn.Module):
    """A table whose rows are clipped where they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Parameter(torch.randn(10, 4)), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.embedding(ids, self.rows, max_norm=1.0))


def max_norm() -> None:
    torch.manual_seed(0)
    model = Clipped()
    ids = torch.arange(24) % 10
    _, optimizer, loader = px.distribute(
        model, sgd(model), (ids, Y[:24]), global_batch=4, shuffle=False, strategy=DistributedStrategy()
    )
    train(model, optimizer, loader)


def other_rates() -> None:
    model, optimizer, loader = distributed()
    optimizer.param_groups[0]["lr"] *= 1 + px.current().rank
    train(model, optimizer, loader)


def other_rates_with_dgc() -> None:
    model, optimizer, loader = distributed(dgc=True)
    optimizer.param_groups[0]["lr"] *= 1 + px.current().rank
    train(model, optimizer, loader)


APART = [changed_in_the_loop, max_norm, other_rates, other_rates_with_dgc]


def changed_by_hand(call: Callable[[nn.Module], object]) -> Callable[[], object]:
    """Return a call of a model whose first row one rank has changed since the last step."""

    def act() -> object:
        model, optimizer, loader = distributed()
        train(model, optimizer, loader)
        if px.current().rank:
            with torch.no_grad():
                model[0].weight[0] += 1
        return call(model)

    return act


def saved_with_other_momentum(folder: Path) -> object:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    _, _, loader = px.distribute(model, optimizer, (X, Y), global_batch=8, strategy=DistributedStrategy())
    train(model, optimizer, loader)
    if px.current().rank:
        optimizer.state[model[2].weight]["momentum_buffer"] += 1
    return px.save(folder / "momentum", model, optimizer)


def evaluated(model: nn.Module) -> float:
    return px.evaluate(model, (X, Y), ["mse"])["mse"]  # type: ignore[no-any-return]


# --- what may differ for a while --------------------------------------------------------------------------------------


def of_each_rank() -> None:
    """Perturb parameters by this rank's own gradient, as sharpness-aware steps do, and take it back before the step."""
    model, optimizer, loader = distributed()
    for x, y in loader:
        with px.no_sync(model):
            F.mse_loss(model(x), y).backward()
        before = [param.detach().clone() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param += param.grad
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for param, value in zip(model.parameters(), before, strict=True):
                param.copy_(value)
        optimizer.step()
        optimizer.zero_grad()


def rounding() -> tuple[list[str], bool]:
    """Change a weight of one rank by its last digits, as other processors would."""
    model, optimizer, loader = distributed()
    with heard() as lines:
        for number, (x, y) in enumerate(loader):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number < 2 and px.current().rank:
                with torch.no_grad():
                    model[0].weight[0] *= 1 + 3e-7
    return [line for line in lines if "rounding" in line], same(model)


def copied() -> bool:
    """A copy of a model whose forward pass compares has no part in it."""
    model = px.shard(net(), {"0": "column", "2": "row"})
    px.distribute(model, strategy=DistributedStrategy(hybrid_configs={"mp_degree": 2}))
    made = applied_to(model)
    assert made is not None
    assert made.drift in model._forward_pre_hooks.values()
    with torch.no_grad():
        twin = copy.deepcopy(list(model._forward_pre_hooks.values())[-1])
        return twin(model, (X,)) is None


# --- one model --------------------------------------------------------------------------------------------------------


def same(model: nn.Module) -> bool:
    """Return whether this rank's floating-point tensors are those of rank 0."""
    flat = torch.cat([t.reshape(-1) for t in model.state_dict().values() if t.is_floating_point()])
    first = flat.clone()
    dist.broadcast(first, 0)
    return torch.equal(flat, first)


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return F.mse_loss(copy.deepcopy(model).eval()(X), Y).item()


def evaluation(how: str, folder: Path) -> dict[str, Any]:
    """Return what `px.evaluate` says, what this rank's model gives after it, and what the model of a save does."""
    settings: dict[str, Any] = {}
    if how == "merged":
        settings = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}
    if how == "localsgd":
        settings = {"localsgd": True, "localsgd_configs": {"k_steps": 4}}
    model, optimizer, loader = distributed(norm=True, **settings)
    for number, (x, y) in enumerate(loader):
        with px.no_sync(model) if how == "no_sync" and (number + 1) % 4 else nullcontext():
            F.mse_loss(model(x), y).backward()
        if how != "no_sync" or (number + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    averaged: nn.Module = model
    if how == "update_bn":
        update_bn(loader, model)
    if how == "swa":
        averaged = AveragedModel(model)
        update_bn(loader, averaged)
    before = loss_of(averaged)
    found = {"said": evaluated(averaged), "own": loss_of(averaged), "same": same(averaged), "before": before}
    px.save(folder / how, averaged)
    return found


EVALUATIONS = ["merged", "no_sync", "update_bn", "swa", "localsgd"]


def predicted(folder: Path) -> dict[str, float]:
    """What `px.Model` says of the models that ranks train apart."""
    torch.manual_seed(0)
    made = net()
    strategy = DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4})
    model = px.Model(made, nn.MSELoss(), sgd(made), strategy=strategy)
    run = model.train(1, (X, Y), global_batch=8, shuffle=False, valid_dataset=(X, Y))
    outputs = model.predict((X, Y))
    px.save(folder / "model", made)
    return {"valid": run.metrics["loss"], "predicted": F.mse_loss(outputs, Y).item()}


def exported(folder: Path) -> tuple[float, float]:
    """The program of models that ranks train apart is that of their average."""
    model, optimizer, loader = distributed(localsgd=True, localsgd_configs={"k_steps": 4})
    train(model, optimizer, loader)
    px.export_program(model, (X,), folder / "program.pt2")
    return evaluated(model), F.mse_loss(torch.export.load(folder / "program.pt2").module()(X), Y).item()


def sync_bn_copies() -> dict[str, Any]:
    """Copies of synchronised layers, made inside the loop."""
    model, optimizer, loader = distributed(norm=True, sync_batch_norm=True)
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        break
    twin, buffer = copy.deepcopy(model), io.BytesIO()
    torch.save(model, buffer)
    read = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    out = model(x)
    return {"bytes": len(buffer.getvalue()), "same": [bool((made(x) == out).all()) for made in (twin, read)]}


@contextmanager
def heard() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx.parallel").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("phalanx.parallel").removeHandler(handler)


def everything(folder: Path) -> dict[str, Any]:
    px.init()
    found: dict[str, Any] = {}

    def note(name: str, act: Callable[[], object]) -> None:
        found[name] = act()

    for act in APART:
        note(act.__name__, lambda act=act: raised(act))
    note("evaluate", lambda: raised(changed_by_hand(evaluated)))
    note("save", lambda: raised(changed_by_hand(lambda model: px.save(folder / "apart", model))))
    note("export", lambda: raised(changed_by_hand(lambda model: px.export_state_dict(model, folder / "apart.st"))))
    note("momentum", lambda: raised(lambda: saved_with_other_momentum(folder)))
    note("plain", lambda: raised(own_models))
    note("sharpness", lambda: raised(of_each_rank))
    note("rounding", rounding)
    note("copied", copied)
    for how in EVALUATIONS:
        note(how, lambda how=how: evaluation(how, folder))
    note("model", lambda: predicted(folder))
    note("exported", lambda: exported(folder))
    note("sync_bn", sync_bn_copies)
    return found


def own_models() -> float:
    model = net()
    nn.init.constant_(model[0].weight, px.current().rank)
    return evaluated(model)


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(everything, 2, Path(folder), timeout_s=110)
        for how in [*EVALUATIONS, "model"]:  # in one process, so that what ranks trained apart is averaged
            read: nn.Module = net(norm=how != "model")
            read = AveragedModel(read) if how == "swa" else read
            px.load(Path(folder) / how, read)
            for of_rank in found:
                of_rank[how]["saved"] = loss_of(read)
        yield found


@pytest.mark.parametrize(
    ("loop", "names", "cause"),
    [
        ("changed_in_the_loop", "2.weight", "they were equal at step 4"),
        ("max_norm", "rows", "weights that are changed on some ranks only"),
        ("other_rates", "0.weight, 0.bias, 2.weight, 2.bias", "other settings on some ranks"),
        ("other_rates_with_dgc", "0.weight, 0.bias, 2.weight, 2.bias", "In step 2 these differ"),
    ],
)
def test_parameters_that_come_apart_end_training_on_all_ranks(
    ranks: list[dict[str, Any]], loop: str, names: str, cause: str
) -> None:
    for found in ranks:
        assert "the ranks' parameters have come apart" in found[loop]
        assert f"{names} (rank 0 against rank 1; by up to" in found[loop]
        assert cause in found[loop]


@pytest.mark.parametrize(
    ("meeting", "call"), [("evaluate", "px.evaluate"), ("save", "px.save"), ("export", "px.export_state_dict")]
)
def test_models_that_differ_are_neither_evaluated_nor_saved(
    ranks: list[dict[str, Any]], meeting: str, call: str
) -> None:
    for found in ranks:
        assert f"At {call} these differ: 0.weight (rank 0 against rank 1" in found[meeting]
        assert "they were equal at step 4" in found[meeting]
        assert "At px.save these differ: 2.weight (momentum_buffer) (rank 0 against" in found["momentum"]
        assert "px.evaluate needs one model, and each rank has its own: the model is not distributed" in found["plain"]


def test_what_differs_only_for_a_while_is_no_error(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["sharpness"] == ""
        assert found["copied"]


def test_differences_by_rounding_are_taken_back_and_said_once(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        lines, is_equal = found["rounding"]
        assert len(lines) == 1
        assert "0.weight (rank 0 against rank 1; by up to" in lines[0]
        assert is_equal


@pytest.mark.parametrize("how", EVALUATIONS)
def test_the_model_that_is_evaluated_is_the_one_that_is_saved(ranks: list[dict[str, Any]], how: str) -> None:
    first, second = (found[how] for found in ranks)
    assert first["before"] != second["before"], "the ranks' own models should differ, or nothing is shown"
    assert first["said"] == second["said"]
    for found in (first, second):
        assert found["saved"] == pytest.approx(found["said"], rel=1e-5)
        if how == "localsgd":
            assert found["own"] == found["before"]
        else:
            assert found["own"] == pytest.approx(found["said"], rel=1e-5)
            assert found["same"]


def test_a_model_that_ranks_train_apart_is_validated_predicted_and_exported_as_it_is_saved(
    ranks: list[dict[str, Any]],
) -> None:
    for found in ranks:
        assert found["model"]["valid"] == pytest.approx(found["model"]["saved"], rel=1e-5)
        assert found["model"]["predicted"] == pytest.approx(found["model"]["saved"], rel=1e-5)
        said, program = found["exported"]
        assert program == pytest.approx(said, rel=1e-5)


def test_a_copy_of_synchronised_layers_holds_neither_the_job_nor_its_data(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["sync_bn"]["bytes"] < 20_000
        assert found["sync_bn"]["same"] == [True, True]


def off(folder: Path) -> None:
    px.init()
    model, optimizer, loader = distributed()
    optimizer.param_groups[0]["lr"] *= 1 + px.current().rank
    train(model, optimizer, loader)
    evaluated(model)
    px.export_state_dict(model, folder / "any.st")
    assert load_file(folder / "any.st").keys() == dict(model.named_parameters()).keys()


def test_zero_turns_the_comparison_off(tmp_path: Path) -> None:
    run_ranks(off, 2, tmp_path, env={"PHALANX_COMPARE_EVERY": "0"})


def uneven() -> str:
    return raised(distributed)


def test_ranks_that_would_compare_at_different_steps_are_stopped_before_training() -> None:
    for said in run_ranks(uneven, 2, env_of_rank=lambda rank: {"PHALANX_COMPARE_EVERY": str(100 + rank)}):
        assert "PHALANX_COMPARE_EVERY must be the same on all ranks, found 100 on rank 0; 101 on rank 1" in said


def hybrid() -> dict[str, Any]:
    """Two copies of two slices: a change on one rank only is seen along the copies, and by all four."""
    px.init()
    model = px.shard(net(), {"0": "column", "2": "row"})
    strategy = DistributedStrategy(hybrid_configs={"dp_degree": 2, "mp_degree": 2})
    _, optimizer, loader = px.distribute(model, sgd(model), (X, Y), global_batch=8, strategy=strategy)
    train(model, optimizer, loader)
    evaluated(model)
    if px.current().rank == 3:
        with torch.no_grad():
            model[0].weight += 1
    return {"said": raised(lambda: evaluated(model))}


def test_slices_are_compared_with_their_copies_and_all_ranks_hear_of_it() -> None:
    for found in run_ranks(hybrid, 4, timeout_s=90):
        assert "At px.evaluate these differ: 0.weight (rank 1 against rank 3; by up to" in found["said"]
