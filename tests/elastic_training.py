"""A training in which members end where a test wants it, for tests of elastic jobs.

`SHARDING` of the environment holds the sharding settings of its strategy, as JSON, and `MERGE` how many global batches
make an update.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phalanx as px
from fake_launcher import FakeLauncher, spawn, tell
from phalanx.comm import process_group
from phalanx.comm.elastic import membership
from phalanx.errors import PeerLostError
from phalanx.parallel.data.replicas import replica_mean
from phalanx.parallel.elastic import meeting, recovery, shard_recovery
from phalanx.parallel.step.gate import has_updated

REPLICAS, SAMPLES, GLOBAL, EPOCHS = 4, 96, 24, 3


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 3, 6, 6, generator=generator), torch.randint(0, 4, (SAMPLES,), generator=generator)


class Net(nn.Module):
    """Batch norm, dropout, and a point where a rank may be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3))
        self.head = nn.Linear(8 * 16, 4)
        self.fault: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.fault == "forward":
            end(self.fault)
        if self.fault == "backward" and hidden.requires_grad:
            hidden.register_hook(lambda _: end("backward"))
        return self.head(hidden)


def end(_where: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP if os.environ.get("FREEZE") else signal.SIGKILL)


def await_replacement() -> None:
    """Continue after the first loss only when another member has come."""
    current = membership.current()
    assert current is not None
    if current.view is not None and current.view.epoch == 1:
        assert current.await_newer(1) is not None, "no joiner came"


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def reach_inside(at: int, where: str) -> None:
    """Let a fault happen where a member completes a global batch, or takes in another one."""

    def around(owner: Any, name: str, *, ends_before: str = "", ends_after: str = "", gives_up: str = "") -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_due = at < 0 or px.init().recovery.committed == at  # any time, for what happens once
            if is_due and where == ends_before:
                end(where)
            result = function(*args, **kwargs)
            if is_due and where == ends_after:
                end(where)
            if is_due and where == gives_up:
                raise PeerLostError("given up while the others complete it")
            return result

        setattr(owner, name, call)

    if os.environ.get("IMPATIENT"):
        process_group.REFORM_TIMEOUT_S = 1.0
    if where == "form":
        fail_once(process_group, "_make_group")
    around(recovery.ElasticRecovery, "_commit", ends_before="commit", ends_after="committed", gives_up="give up")
    around(replica_mean.MeanScale, "end_turn", ends_before="weigh", ends_after="weighed")
    around(recovery, "exchange_progress", ends_before="exchange", ends_after="agreed")
    around(recovery.ElasticRecovery, "_continue", ends_after="recovered")
    around(meeting, "send_state", ends_before="send", ends_after="sent")
    shards = shard_recovery.ShardRecovery
    around(shards, "share_update", ends_before="updated", ends_after="shared")
    around(shards, "meet", ends_before="gathered")
    around(shards, "send", ends_before="reshard", ends_after="resharded")


def fail_once(owner: Any, name: str) -> None:
    function, calls = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            raise PeerLostError("given up while the others complete it")
        return function(*args, **kwargs)

    setattr(owner, name, call)


def strategy_of_job() -> px.DistributedStrategy:
    """Return what the environment asks for."""
    settings = os.environ.get("SHARDING")
    merge = int(os.environ.get("MERGE", "1"))
    return px.DistributedStrategy(
        sharding=settings is not None,
        sharding_configs=json.loads(settings or "{}"),
        gradient_merge=merge > 1,
        gradient_merge_configs={"k_steps": merge},
        clip=merge > 1,
        clip_configs={"norm": 1.0},
    )


def train(faults: dict[str, tuple[int, str]], spawns: tuple[int, ...] = (), leaves: tuple[str, int] = ("", 0)) -> Any:
    """Train; a member ends at (updates done, where) of its id."""
    own = os.environ.get("PHALANX_MEMBER_ID", "")
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer, loader = px.distribute(
        net, optimizer, TensorDataset(*images()), global_batch=GLOBAL, seed=5, strategy=strategy_of_job()
    )
    scheduler = px.follow_updates(torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5))
    at, where = faults.get(own, (-1, "nowhere"))
    reach_inside(at, where)
    updates, seen = 0, []
    for _ in range(loader.epoch, EPOCHS):
        for x, y in loader:
            context = px.init()
            if context.recovery is not None:
                updates = context.recovery.committed
            net.fault = where if updates == at else None
            if own == "n0.0" and os.environ.get("AWAITS_REPLACEMENT"):
                await_replacement()
            optimizer.zero_grad()
            if os.environ.get("WEIGHTED"):  # a mean over the labels that count, which replicas have differently many of
                total = F.cross_entropy(model(x), y, reduction="sum", ignore_index=0)
                loss = px.weighted_mean(total, (y != 0).sum())
            else:
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            if "MERGE" not in os.environ:  # it would clip the gradients of a batch
                torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            if net.fault == "step":
                end("step")
            optimizer.step()
            scheduler.step()
            if has_updated(optimizer):
                updates += 1
                seen.append((loader.epoch, updates))
                if net.fault == "after":
                    end("after")
                if own == "n0.0" and updates in spawns:
                    spawn()
                if (own, updates) == leaves:
                    tell("leave", reason="asked to")
    current = membership.current()
    epoch = -1 if current is None or current.view is None else current.view.epoch
    return digest(model), updates, epoch, context.world_size


def job(*args: Any, members: int, **options: Any) -> FakeLauncher:
    return FakeLauncher(
        train, *args, members=members, env={"PHALANX_REPLICAS": str(REPLICAS), **options.pop("env", {})}, **options
    )
