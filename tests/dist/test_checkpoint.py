"""Checkpoints of several ranks, loaded at other numbers of ranks and under other placements."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import phalanx as px
from phalanx.checkpoint.tensors import write_plan
from phalanx.comm import process_group
from phalanx.data.sampling.shards import even_split
from phalanx.errors import BackendError, ConfigError, DataError, PeerLostError
from phalanx.parallel.stateful import keep_state
from phalanx.plan.value import Average, Axis, OnRanks, ParamRule, Plan, Replicate, Shard, Step
from ranks import run_ranks

pytestmark = pytest.mark.dist

GENERATOR = torch.Generator().manual_seed(7)
DATA = (torch.randn(40, 6, generator=GENERATOR), torch.arange(40))
"""The label of a row is its number, so that batches can be told apart."""


def _mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 40))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, steps: int) -> None:
    for x, y in itertools.islice(batches, steps):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every whole tensor of model and optimizer, by name. Collective for sharded ones."""
    found = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in sorted(optimizer.state[param].items()):
            found[f"{name}/{key}"] = _whole(value)
    return found


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Residual:
    def __init__(self, tensor: Tensor, steps: int) -> None:
        self.tensor, self.steps = tensor, steps

    def state_dict(self) -> dict[str, Any]:
        return {"by_name": {"a.b": self.tensor}, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor, self.steps = state["by_name"]["a.b"], state["steps"]


# --- data parallel ----------------------------------------------------------------------------------------------------


def _make_dp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, px.data.ShardedLoader]:
    model = _mlp(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _, _, loader = px.distribute(model, optimizer, DATA, global_batch=8, seed=1, replicas=0)
    assert loader is not None
    return model, optimizer, loader


def _save_dp(folder: Path) -> tuple[dict[str, Tensor], list[list[int]], Tensor]:
    rank = px.init().rank
    model, optimizer, loader = _make_dp(0)
    keep_state(model, "residual", Residual(torch.full((3,), rank + 1.0), 9), elsewhere="share")
    batches = iter(loader)
    _train(model, optimizer, batches, 2)
    write_plan.PIECE_BYTES = 64  # so that even these tensors are split over the ranks
    px.save(folder, model, optimizer, loader, step=2, extra={"rank": rank}, background=True)
    state = _state(model, optimizer)
    draw = torch.rand(2)
    rest = [y.tolist() for _, y in batches]
    _train(model, optimizer, iter(loader), 1)  # what was copied does not change
    px.checkpoint.wait()
    if px.current().world_size == 2:
        model.eval()
        px.export_program(model, (DATA[0],), folder.with_name("program.pt2"))
        torch.save(model(DATA[0]).detach(), folder.with_name(f"output-{rank}"))
    return state, rest, draw


def _load_dp(folder: Path) -> tuple[Any, ...]:
    context = px.init()
    model, optimizer, loader = _make_dp(1)
    residual = Residual(torch.zeros(3), 0)
    keep_state(model, "residual", residual, elsewhere="share")
    found = px.load(folder, model, optimizer, loader)
    draw = torch.rand(2)
    state = _state(model, optimizer)
    rest = [y.tolist() for _, y in loader]
    again = folder.with_name(f"{folder.name}-from-{context.world_size}")
    px.export_state_dict(model, again)
    return state, rest, draw, (found.step, found.extra), (residual.tensor.tolist(), residual.steps)


def _together(per_rank: list[list[list[int]]]) -> list[list[int]]:
    return [[row for part in step for row in part] for step in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("saved_ranks", [2, 4])
def test_data_parallel_training_goes_on_at_any_number_of_ranks(tmp_path: Path, saved_ranks: int) -> None:
    folder = tmp_path / "dp"
    saved = run_ranks(_save_dp, saved_ranks, folder)
    if saved_ranks == 2:
        program = torch.export.load(tmp_path / "program.pt2").module()
        assert torch.equal(program(DATA[0]), torch.load(tmp_path / "output-0"))
    manifest = json.loads(next(folder.glob("step-2/manifest*")).read_text())
    assert len(manifest["tensors"]["model/2.weight"][2]) == saved_ranks
    for ranks in (1, 2, 4):
        loaded = run_ranks(_load_dp, ranks, folder)
        assert all(_same(state, saved[0][0]) for state, *_ in loaded)
        assert _together([rest for _, rest, *_ in loaded]) == _together([rest for _, rest, _ in saved])
        expected = [{"rank": rank} if ranks == saved_ranks else {"rank": 0} for rank in range(ranks)]
        assert [extra for *_, (_, extra), _ in loaded] == expected
        share = sum(range(saved_ranks + 1)) / ranks
        residuals = [share] * ranks if ranks != saved_ranks else [rank + 1.0 for rank in range(ranks)]
        assert [kept for *_, kept in loaded] == [([value] * 3, 9) for value in residuals]
        for rank in range(min(ranks, saved_ranks)):
            assert torch.equal(loaded[rank][2], saved[rank][2])
        weights = {name: t for name, t in saved[0][0].items() if "/" not in name}
        plain = _mlp(3)
        px.load(folder.with_name(f"dp-from-{ranks}"), plain)
        assert _same(dict(plain.state_dict()), weights)


# --- one file of an optimizer -----------------------------------------------------------------------------------------


def _make_zero(seed: int, zero: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 40))
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "lr": 0.02}]
    )
    strategy = px.DistributedStrategy()
    if zero:
        strategy.sharding, strategy.sharding_configs = True, {"stage": zero}
    _, _, loader = px.distribute(model, optimizer, DATA, strategy=strategy, global_batch=8, seed=1)
    return model, optimizer, loader


def _save_zero(folder: Path, zero: int) -> dict[str, Tensor]:
    model, optimizer, loader = _make_zero(0, zero)
    _train(model, optimizer, iter(loader), 3)
    px.export_state_dict(model, folder / "m.pdparams")
    px.export_state_dict(optimizer, folder / "m.pdopt")
    return _state(model, optimizer)


def _load_zero(folder: Path, zero: int) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer, loader = _make_zero(1, zero)
    _train(model, optimizer, iter(loader), 1)
    optimizer.param_groups[0]["lr"] = 7.0
    px.load(folder / "m.pdparams", model)
    px.load(folder / "m.pdopt", optimizer)
    return _state(model, optimizer), [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("saved_ranks", "zero"), [(1, 0), (2, 1), (2, 3)])
def test_state_of_an_optimizer_goes_into_one_file_and_back(tmp_path: Path, saved_ranks: int, zero: int) -> None:
    saved = run_ranks(_save_zero, saved_ranks, tmp_path, zero)
    for ranks, other_zero in ((1, 0), (2, 2), (2, 3)):
        for state, rates in run_ranks(_load_zero, ranks, tmp_path, other_zero):
            assert _same(state, saved[0])
            assert rates == [0.01, 0.02]
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 40))
    optimizer = torch.optim.Adam([{"params": plain[0].parameters()}, {"params": plain[2].parameters()}])
    px.load(tmp_path / "m.pdparams", plain)
    px.load(tmp_path / "m.pdopt", optimizer)  # of no distributed model: parameters in their order
    assert _same(_state(plain, optimizer), saved[0])


# --- sharded by torch's FSDP2, and by layers that hold their own part -------------------------------------------------


def _make_fsdp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    fully_shard(model[0])
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


class Columns(nn.Module):
    """Holds its own run of the rows of a weight."""

    def __init__(self, sizes: list[int], seed: int) -> None:
        super().__init__()
        whole = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(seed))
        rank = px.init().rank
        first = sum(sizes[:rank])
        self.weight = nn.Parameter(whole[first : first + sizes[rank]].clone())
        self.weight.is_distributed = True
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sum() * x.sum() + self.bias.sum()


def _make_columns(sizes: list[int], seed: int, *, says_layout: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Columns(sizes, seed)
    layout: dict[str, Any] = {"dp": Shard(dim=0, sizes=tuple(sizes)) if says_layout else Replicate()}
    rule = ParamRule(match="weight", managed="module", place=OnRanks(layout=layout))
    axes = (Axis(name="dp", size=len(sizes)),)
    px.apply(Plan(mesh=axes, params=(ParamRule(match="*"), rule), step=Step(batch_axes=("dp",))), model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _gathered(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: list[int]) -> list[Tensor]:
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    return [px.comm.all_gather(t.detach(), sizes=sizes).clone() for t in (model.weight, momentum)]


def _save_sharded(folder: Path) -> tuple[Any, ...]:
    px.init()
    model, optimizer = _make_fsdp(0)
    ema = px.EMA(model, decay=0.5, optimizer=optimizer)
    _train_fsdp(model, optimizer)
    px.save(folder / "fsdp", nn.Sequential(model)[0], optimizer, ema=ema)
    px.export_state_dict(model, folder / "fsdp-weights")
    columns, columns_optimizer = _make_columns([3, 2], 1)
    columns(torch.ones(2)).backward()
    columns_optimizer.step()
    columns_optimizer.state[columns.weight]["momentum_buffer"].copy_(columns.weight)
    px.save(folder / "columns", columns, columns_optimizer)
    unknown, _ = _make_columns([3, 2], 1, says_layout=False)
    px.save(folder / "unknown", unknown)
    other, _ = _make_columns([3, 2], 2, says_layout=False)
    px.load(folder / "unknown", other)
    assert torch.equal(other.weight, unknown.weight)
    with pytest.raises(ConfigError, match="'weight' is a shard of unknown layout, of its layer or of a rank"):
        px.export_state_dict(unknown, folder / "unknown-weights")
    with pytest.raises(ConfigError, match="is not full on every rank"):
        px.export_program(model, (torch.ones(1, 6),), folder / "program.pt2")
    return _state(model, optimizer), _gathered(columns, columns_optimizer, [3, 2]), _averages(ema)


def _averages(ema: px.EMA) -> list[Tensor]:
    return [_whole(tensor) for tensor in ema.state_dict()["shadow"].values()]


def _train_fsdp(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(DATA[0][:4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _load_sharded(folder: Path) -> tuple[Any, ...]:
    context = px.init()
    if context.world_size == 1:
        torch.manual_seed(5)
        model: nn.Module = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    else:
        model, optimizer = _make_fsdp(5)
    ema = px.EMA(model, decay=0.5)
    px.load(folder / "fsdp", model, optimizer, ema=ema)
    state = _state(model, optimizer)
    _train_fsdp(model, optimizer)  # state of the right kind, which steps
    px.load(folder / "fsdp-weights", model)
    assert all(torch.equal(_whole(t), state[name]) for name, t in model.state_dict().items())
    sizes = [even_split(5, context.world_size, rank)[1] for rank in range(context.world_size)]
    columns, columns_optimizer = _make_columns(sizes, 2)
    px.load(folder / "columns", columns, columns_optimizer)
    unknown, _ = _make_columns(sizes, 2, says_layout=False)
    with pytest.raises(ConfigError, match=r"'model/weight' was saved as 2 shards .* cannot be resharded to"):
        px.load(folder / "unknown", unknown)
    return state, _gathered(columns, columns_optimizer, sizes), _averages(ema)


def test_sharded_training_goes_on_at_any_number_of_ranks(tmp_path: Path) -> None:
    saved = run_ranks(_save_sharded, 2, tmp_path)
    for ranks in (1, 4):
        for state, columns, averages in run_ranks(_load_sharded, ranks, tmp_path):
            assert _same(state, saved[0][0])
            assert all(map(torch.equal, columns, saved[0][1]))
            assert all(map(torch.equal, averages, saved[0][2]))


# --- cut by the Plan --------------------------------------------------------------------------------------------------


def _make_cut(way: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    strategy = px.DistributedStrategy()
    if "tp" in way:
        px.shard(model, {"0": "column", "2": "row"})
        strategy.hybrid_configs = {"sharding_degree" if "sharded" in way else "dp_degree": 2, "mp_degree": 2}
    elif "sharded" in way:
        strategy.sharding = True
    if "stages" in way:
        strategy.pipeline = True
        strategy.pipeline_configs = {"accumulate_steps": 2, "cuts": ["2"]}
    px.distribute(model, optimizer, strategy=strategy)
    return model, optimizer


def _step_cut(way: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs, target = DATA[0][:8], DATA[1][:8] % 3
    if "stages" in way:
        step = px.train_step(model, F.cross_entropy, optimizer)
        step(inputs, target)
        step(inputs, target)
        return
    for _ in range(2):
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()


def _save_cut(folder: Path, way: str) -> None:
    px.init()
    model, optimizer = _make_cut(way, 0)
    _step_cut(way, model, optimizer)
    px.save(folder / way, model, optimizer)


def _load_cut(folder: Path, sources: list[str], way: str) -> None:
    px.init()
    for source in sources:
        model, optimizer = _make_cut(way, 1)
        px.load(folder / source, model, optimizer)
        px.save(folder / f"{source}-{way}", model, optimizer)
        _step_cut(way, model, optimizer)  # the state is of the right kind
        with pytest.raises(ConfigError, match="is not full on every rank"):
            px.export_program(model, (DATA[0],), folder / "program")


def _load_alone(folder: Path) -> dict[str, Tensor]:
    model, optimizer = _make_cut("whole", 2)
    px.load(folder, model, optimizer)
    return _state(model, optimizer)


def test_what_any_plan_saved_is_the_same_bits_under_any_other(tmp_path: Path) -> None:
    for way in ("dp", "tp", "tp+sharded"):
        run_ranks(_save_cut, 4, tmp_path, way)
    run_ranks(_load_cut, 4, tmp_path, ["dp", "tp+sharded"], "tp")  # tp=2 x dp=2
    run_ranks(_load_cut, 4, tmp_path, ["dp"], "tp+sharded")
    run_ranks(_load_cut, 2, tmp_path, ["dp", "tp"], "sharded")
    run_ranks(_load_cut, 2, tmp_path, ["tp"], "stages")
    found = {path.name: _load_alone(path) for path in sorted(tmp_path.iterdir())}
    assert len(found) == 3 + 6
    for name, state in found.items():
        assert len(state) == 6 * 4
        assert _same(state, found[name.partition("-")[0]]), name


# --- ranks that train apart ------------------------------------------------------------------------------------------


def _make_apart(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, px.data.ShardedLoader]:
    model = _mlp(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    update = Average(every=3, begin_step=1)
    axes = (Axis(name="dp", size=px.init().world_size),)
    plan = Plan(mesh=axes, params=(ParamRule(match="*", update=update),), step=Step(batch_axes=("dp",)))
    _, _, loader = px.distribute(model, optimizer, DATA, global_batch=8, seed=1, plan=plan)
    assert loader is not None
    return model, optimizer, loader


def _save_apart(folder: Path) -> tuple[dict[str, Tensor], ...]:
    px.init()
    model, optimizer, loader = _make_apart(0)
    batches = iter(loader)
    _train(model, optimizer, batches, 2)
    saved = _state(model, optimizer)
    px.save(folder, model, optimizer, loader)
    _train(model, optimizer, batches, 2)
    return saved, _state(model, optimizer)


def _load_apart(folder: Path) -> tuple[dict[str, Tensor], ...]:
    px.init()
    model, optimizer, loader = _make_apart(1)
    px.load(folder, model, optimizer, loader)
    loaded = _state(model, optimizer)
    _train(model, optimizer, iter(loader), 2)
    return loaded, _state(model, optimizer)


def test_ranks_that_train_apart_go_on_apart_or_with_their_mean(tmp_path: Path) -> None:
    saved = run_ranks(_save_apart, 2, tmp_path)
    assert not _same(saved[0][0], saved[1][0])
    loaded = run_ranks(_load_apart, 2, tmp_path)
    assert all(_same(a, b) for mine, its in zip(saved, loaded, strict=True) for a, b in zip(mine, its, strict=True))
    for name, tensor in run_ranks(_load_apart, 1, tmp_path)[0][0].items():
        a, b = saved[0][0][name], saved[1][0][name]
        mean = (a.double() + b.double()) / 2 if tensor.is_floating_point() else a
        assert torch.equal(tensor, mean.to(tensor.dtype)), name


# --- what goes wrong --------------------------------------------------------------------------------------------------


def _mistakes(folder: Path) -> list[str]:
    context = px.init()
    rank, store = context.rank, process_group.meeting().store
    model = _mlp(0)
    heard = []
    px.save(folder, model, step=1)
    fsync = os.fsync

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    os.fsync = full if rank else fsync
    with pytest.raises(BackendError) as error:
        px.save(folder, model, step=2)
    os.fsync = fsync
    heard.append(str(error.value))
    with pytest.raises(ConfigError) as differ:
        px.save(folder, model, step=3 + rank)
    heard.append(str(differ.value))
    with pytest.raises(ConfigError) as wrong:
        px.load(folder, model if rank == 0 else nn.Linear(6, 5))
    heard.append(str(wrong.value))
    store.set(f"waited/{rank}", "")
    assert store.wait(["waited/0", "waited/1"], 10)
    if rank == 0:
        with pytest.raises(PeerLostError) as absent:
            px.save(folder, model)
        heard.append(str(absent.value))
        store.set("told", "")
    else:
        assert store.wait(["told"], 20)
    return heard


def test_a_mistake_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(_mistakes, 2, tmp_path, env={"PHALANX_RENDEZVOUS_TIMEOUT_S": "2"})
    assert first[0] == f"on rank 1: {second[0]}"
    assert re.match(r"the file system did not take \S+/step-2/rank-1-\S+: No space left on device", second[0])
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert len(list((tmp_path / "step-1").iterdir())) == 4
    assert first[1] == second[1]
    assert "px.save.step must be the same on all ranks, found 3 on rank 0; 4 on rank 1" in first[1]
    assert second[2] == f"on rank 0: {first[2]}" or first[2] == second[2]
    assert "rank 1" in first[3]
    assert "did not come to 'px.save'" in first[3]


def _see_different_folders(folder: Path) -> list[str]:
    rank = px.init().rank
    os.chdir(folder / str(rank))
    model, heard = nn.Linear(1, 1), []
    weights = {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
    for source in ("other", "missing", weights if rank == 0 else {}):
        with pytest.raises((ConfigError, DataError)) as wrong:
            px.load(source, model)
        heard.append(str(wrong.value))
    assert model.weight.item() != 1
    return heard


def test_ranks_that_see_different_files_hear_of_it(tmp_path: Path) -> None:
    for rank in range(2):
        px.save(tmp_path / str(rank) / "other", nn.Linear(1, 1), step=1)
        (tmp_path / str(rank) / "missing").mkdir()
    px.save(tmp_path / "0" / "missing", nn.Linear(1, 1), step=1)
    first, second = run_ranks(_see_different_folders, 2, tmp_path)
    assert "step-1 is not the same checkpoint on all ranks. Name a folder that all nodes share" in first[0]
    assert "no complete.json: its save did not end. (Rank 1 says so.)" in first[1]
    assert first[2] == f"on rank 1: {second[2]}"
    assert "the state dict does not fit" in first[2]


def _save_together_then_alone(folder: Path) -> bool:
    rank = px.init().rank
    model = nn.Linear(1024, 1024)  # so large that ranks share the writing
    px.save(folder / "together", model)
    px.shutdown()
    if rank:
        return True
    os.environ.clear()
    other = nn.Linear(1024, 1024)
    px.save(folder / "alone", model)
    px.load(folder / "alone", other)
    return torch.equal(model.weight, other.weight)


def test_a_process_that_goes_on_alone_saves_all_of_it(tmp_path: Path) -> None:
    assert run_ranks(_save_together_then_alone, 2, tmp_path) == [True, True]


def _train_until_asked(folder: Path, checkpoints: list[px.Checkpointer]) -> None:
    rank = px.init().rank
    model, optimizer, loader = _make_dp(0)
    checkpoints.append(px.Checkpointer(folder, model, optimizer, loader))
    for _ in itertools.count():
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 1 and checkpoints[0].steps == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoints[0].step()


def _leave(folder: Path) -> tuple[Any, int, list[str]]:
    checkpoints: list[px.Checkpointer] = []
    with pytest.raises(SystemExit) as stop:
        _train_until_asked(folder, checkpoints)
    dist.barrier()  # nobody is left in a collective
    return stop.value.code, checkpoints[0].steps, sorted(path.name for path in folder.iterdir())


def test_all_ranks_leave_at_one_step_when_one_is_asked_to(tmp_path: Path) -> None:
    first, second = run_ranks(_leave, 2, tmp_path)
    assert first == second
    code, steps, saved = first
    assert (code, saved) == (0, [f"step-{steps}"])
