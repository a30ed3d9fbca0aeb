"""Ranks of unequal speed share a global batch by their speeds, and train what one process does."""

from __future__ import annotations

import json
import resource
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import Dataset, TensorDataset

import phalanx as px
from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.context import DataParallelRank
from phalanx.errors import ConfigError
from phalanx.parallel.balance.load_balance import MOST_INTERVAL, LoadBalance, ReplicaSplit
from phalanx.parallel.balance.step_clock import MeasuredWork
from phalanx.strategy import DistributedStrategy
from ranks import run_ranks

pytestmark = pytest.mark.dist

SAMPLES, GLOBAL = 101, 16
"""The last global batch of an epoch has 5 samples."""

SLOW_S, FAST_S = 4e-3, 0.5e-3
"""Seconds of a sample. What else a step takes is the same for both ranks, and grows on a busy machine: so tests ask
which rank has more, not for the ratio of these."""

MORE = 10
"""Samples of a global batch that are clearly more than half."""

Slow = dict[str, float]
"""Seconds of a sample in `input`, `forward` and `backward`, and of an update in `update`."""


class Samples(Dataset[Any]):
    """Vectors, which take a rank its seconds to load; tells which were read."""

    def __init__(self, seconds: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)
        self.seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        time.sleep(self.seconds)
        return self.x[index], self.y[index], index


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class Net(nn.Module):
    """A net in which each sample takes a rank its seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.slow: Slow = {}

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(len(x) * self.slow.get("forward", 0.0))
        return _SleepInBackward.apply(self.net(x), len(x) * self.slow.get("backward", 0.0))  # type: ignore[no-any-return, no-untyped-call]


class Ranks:
    """What every rank trains: `where` the second one is slow."""

    def __init__(self, balance: Any, where: str = "forward", *, workers: int = 0, zero: int = 0, replicas: Any = None):
        torch.manual_seed(1)
        settings: dict[str, Any] = {"sharding": True, "sharding_configs": {"stage": zero}} if zero else {}
        data, loading = Samples(), {"num_workers": workers, "persistent_workers": True} if workers else {}
        net = Net()
        self.net, self.optimizer, self.loader = px.distribute(
            net,
            torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
            data,
            global_batch=GLOBAL,
            strategy=DistributedStrategy(**settings),
            balance=balance,
            replicas=replicas,
            seed=5,
            **loading,
        )
        self.context = px.current()
        self.seconds = SLOW_S if self.context.rank == 1 else FAST_S
        data.seconds = self.seconds if where == "input" else 0.0
        net.slow = {where: self.seconds}
        self.rows: list[int] = []
        self.read: list[list[int]] = []

    def train(self, updates: int) -> None:
        """Train for so many updates, and note rows and samples of each batch; ends inside an epoch."""
        done = 0
        while True:
            read: list[int] = []
            for x, y, index in self.loader:
                self.optimizer.zero_grad()
                ((self.net(x) - y) ** 2).mean().backward()
                self.optimizer.step()
                self.rows.append(len(x))
                read += index.tolist() if self.loader.share.rows else []
                done += px.has_updated(self.optimizer)
                if done == updates:
                    return
            self.read.append(read)

    def weights(self) -> Tensor:
        options = StateDictOptions(full_state_dict=True)
        return torch.cat(
            [value.flatten() for _, value in sorted(get_model_state_dict(self.net, options=options).items())]
        )


def train(where: str, updates: int, settings: dict[str, Any]) -> tuple[Tensor, list[int], list[list[int]]]:
    ranks = Ranks(settings.pop("balance", "samples"), where, **settings)
    ranks.train(updates)
    return ranks.weights(), ranks.rows, ranks.read


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("forward", {}),
        ("backward", {}),
        ("input", {}),
        ("forward", {"workers": 1}),
        ("forward", {"zero": 1}),
        ("backward", {"zero": 3}),
    ],
    ids=str,
)
def test_faster_ranks_read_more_samples_and_gradients_are_those_of_one_process(
    where: str, settings: dict[str, Any]
) -> None:
    updates = 45
    (alone, _, _), *_ = run_ranks(partial(train, where, updates, {}), 1)
    (first, fast, read), (second, slow, other) = run_ranks(partial(train, where, updates, settings), 2)
    assert (fast[0], slow[0]) == (8, 8)
    assert fast[-1] + slow[-1] == GLOBAL
    assert fast[-1] >= MORE
    assert [sorted(own + others) for own, others in zip(read, other, strict=True)] == [list(range(SAMPLES))] * len(read)
    for weights in (first, second):
        torch.testing.assert_close(weights, alone, rtol=1e-12, atol=1e-12)


def train_planned(replicas: int | None) -> tuple[Tensor, list[int]]:
    """Return the weights of a Plan for a node that is four times as fast as the other, and the rows of each batch."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 4))
    data = TensorDataset(torch.randn(320, 256), torch.randint(4, (320,)))
    optimizer, strategy = torch.optim.SGD(net.parameters(), lr=0.05), DistributedStrategy()
    strategy.logical_replicas = replicas or 0
    plan = None
    if px.init().world_size == 2:
        limits, cluster = ["tp=1", "pp=1", "zero=0", "recompute=none"], "a100x1+a100x1,speed=0.25"
        sample = torch.zeros(1 << 15, 256), torch.zeros(1 << 15).long()  # so many that arithmetic takes the time
        answer = px.auto_parallel(net, sample, F.cross_entropy, cluster=cluster, limits=limits, strategy=strategy)
        plan, strategy = answer.plan, None
    net, optimizer, loader = px.distribute(
        net, optimizer, data, global_batch=64, seed=3, strategy=strategy, **({} if plan is None else {"plan": plan})
    )
    rows = []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        rows.append(len(x))
    return torch.cat([param.detach().flatten() for param in net.parameters()]), rows


@pytest.mark.parametrize("replicas", [None, 8])
def test_a_plan_for_unequal_nodes_trains_with_its_parts_from_the_first_batch_on(replicas: int | None) -> None:
    (alone, _), *_ = run_ranks(partial(train_planned, replicas), 1)
    (first, fast), (second, slow) = run_ranks(partial(train_planned, replicas), 2)
    assert sum(fast) + sum(slow) == 5 * 64
    assert sum(fast) >= 3 * sum(slow)
    assert len(set(fast)) == len(set(slow)) == 1
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=0 if replicas else 1e-4, atol=0 if replicas else 1e-6)


def test_ranks_of_equal_speed_keep_equal_parts_whatever_they_wait_for_each_other() -> None:
    results = run_ranks(wait_for_each_other, 2)
    # Other processes may slow one rank a little for a moment; a wait that counted would be forty times its work.
    assert all(5 <= size <= 11 or size in {2, 3} for rows in results for size in rows)


def wait_for_each_other() -> list[int]:
    """Train where one rank is late between two updates, as one that logs is: the other waits for it."""
    ranks = Ranks("samples", "nowhere")
    step = ranks.optimizer.step

    def late() -> None:
        step()
        time.sleep(0.02 * (ranks.context.rank == 1))

    ranks.optimizer.step = late  # type: ignore[method-assign]
    ranks.net.slow = {"forward": FAST_S}
    ranks.train(3 * MOST_INTERVAL)
    return ranks.rows


def resume(folder: Path, updates: int, *, loads: bool) -> tuple[Tensor, list[int]]:
    ranks = Ranks("samples")
    if loads:
        px.load(folder, ranks.net, ranks.optimizer, ranks.loader)
    ranks.train(updates)
    px.save(folder, ranks.net, ranks.optimizer, ranks.loader)
    return ranks.weights(), ranks.rows


def test_a_balanced_run_resumes_inside_an_epoch_on_any_number_of_ranks(tmp_path: Path) -> None:
    (alone, _), *_ = run_ranks(partial(resume, tmp_path / "alone", 60, loads=False), 1)
    (_, rows), *_ = run_ranks(partial(resume, tmp_path / "balanced", 30, loads=False), 2)
    assert max(rows) > 8
    (weights, rows), *_ = run_ranks(partial(resume, tmp_path / "balanced", 26, loads=True), 2)
    assert max(rows) > 8
    (weights, _), *_ = run_ranks(partial(resume, tmp_path / "balanced", 4, loads=True), 1)
    torch.testing.assert_close(weights, alone, rtol=1e-12, atol=1e-12)


def go_back() -> tuple[list[int], Tensor]:
    """Train, go back to the beginning in the same process, and get slow on the other rank."""
    ranks = Ranks("samples")
    state = ranks.loader.state_dict()
    ranks.train(30)
    before = ranks.rows[-1]
    ranks.loader.load_state_dict(state)
    ranks.net.slow = {"forward": FAST_S if ranks.context.rank == 1 else SLOW_S}
    ranks.train(45)
    return [before, ranks.rows[-1]], ranks.weights()


def test_speeds_may_change_and_a_loader_may_go_back() -> None:
    (fast, first), (slow, second) = run_ranks(go_back, 2)
    assert fast[0] >= MORE
    assert slow[1] >= MORE
    assert torch.equal(first, second)


@pytest.mark.parametrize("where", ["forward", "backward", "input"])
def test_replicas_move_wherever_a_rank_is_slow_and_no_bit_changes(where: str) -> None:
    settings = {"balance": "replicas", "replicas": 8}
    (alone, _, _), *_ = run_ranks(partial(train, where, 25, dict(settings)), 1)
    (first, fast, _), (second, slow, _) = run_ranks(partial(train, where, 25, dict(settings)), 2)
    assert len(fast) + len(slow) == 25 * 8
    assert len(fast) >= len(slow) + 10, "passes of the loop: replicas move after 20 updates"
    assert torch.equal(first, alone)
    assert torch.equal(second, alone)


def decide_in_columns() -> tuple[list[int], list[int]]:
    """Return what ranks of a mesh data 2 x model 2 decide, of which the last is slow."""
    context = px.init()
    groups = [dist.new_group([column, column + 2]) for column in range(2)]
    row, column = divmod(context.rank, 2)
    context.mesh_readers = DataParallelRank(row, 2, groups[column], 8)
    replicas = Replicas((range(4), range(4, 8)), row)
    context.use_replicas(replicas)
    balance = LoadBalance(context, ReplicaSplit(context, replicas))
    batch_s = 9.0 if context.rank == 3 else 1.0
    balance._clock.take = lambda: MeasuredWork(batch_s, 0.0, batches=1, rows=1, updates=1)  # type: ignore[method-assign]
    for _ in range(2 * MOST_INTERVAL):
        time.sleep(0.025)
        balance.updated(None)  # type: ignore[arg-type]
    return [len(local) for local in replicas.assignment], list(replicas.local)


def test_ranks_that_compute_a_replica_together_decide_alike() -> None:
    results = run_ranks(decide_in_columns, 4)
    assert results == [([7, 1], list(range(7)))] * 2 + [([7, 1], [7])] * 2


def train_within(limited: bool) -> int:
    """Return how many samples the fast rank reads at last, with no memory left if limited."""
    ranks = Ranks("samples")
    ranks.train(3)
    if limited and ranks.context.rank == 0:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))
        balance = px.parallel.session.session.balance  # type: ignore[attr-defined]
        balance._headroom._at_start -= 1 << 30  # as if its 8 samples took as much
    ranks.train(40)
    return ranks.rows[-1]


@pytest.mark.parametrize("limited", [False, True])
def test_a_rank_whose_memory_is_full_gets_no_more(limited: bool) -> None:
    rows, _ = run_ranks(train_within, 2, limited)
    assert (rows == 8) is limited


def report(events: Path) -> tuple[str, list[dict[str, Any]]]:
    ranks = Ranks("samples")
    ranks.train(25)
    px.report(loss=1.0)
    lines = Path(f"{events}.{ranks.context.rank}").read_text().splitlines()
    return "", [json.loads(line) for line in lines]


def test_a_move_is_logged_and_in_the_event_file_of_the_run(tmp_path: Path) -> None:
    events = tmp_path / "events"
    results = run_ranks(report, 2, events, env_of_rank=lambda rank: {"PHALANX_EVENTS_FILE": f"{events}.{rank}"})
    (_, first), (_, second) = results
    move = next(event for event in first if event.get("kind") == "balance")
    assert (move["unit"], move["before"]) == ("samples", [8, 8])
    assert sum(move["after"]) == GLOBAL
    assert move["gain"] > 0.1
    assert move["ms_per_sample"][1] > 1.5 * move["ms_per_sample"][0] > 0
    steps = [next(event for event in rank if "step" in event) for rank in (first, second)]
    assert [step["share"] for step in steps] == [size / GLOBAL for size in move["after"]]
    assert steps[1]["ms_per_sample"] > 1.5 * steps[0]["ms_per_sample"] > 0
    assert "replicas" not in steps[0]
    assert not any("event" in event for event in second)


def refused(kind: str) -> str:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(12, 2)

    def stream() -> Any:
        yield from x

    data: Any = {
        "stream": stream,
        "batch sampler": torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x),
            batch_sampler=[[0, 1], [2, 3, 4]],  # type: ignore[arg-type]
        ),
    }[kind]
    sizes = {"global_batch": 4} if kind == "stream" else {}
    _, _, loader = px.distribute(net, optimizer, data, balance="samples", **sizes)  # type: ignore[arg-type]
    try:
        for _ in loader:  # type: ignore[union-attr]
            pass
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["stream", "batch sampler"])
def test_batches_that_are_not_cut_here_are_refused(kind: str) -> None:
    for message in run_ranks(refused, 2, kind):
        assert f"with a {kind}" in message
