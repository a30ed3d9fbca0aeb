"""One rank of `bench_elastic` and of the fault tests: trains, and writes which samples entered which update.

Lines of JSON, a file for each process (`log.PID.jsonl`), written at once, so that a kill loses none:

    {"start": seconds, "member": id}                     when the process began
    {"first": seconds}                                   when its first gradients were computed
    {"computes": update, "replica": r, "ids": [...]}     before the forward pass
    {"update": update, "time": seconds, "ids": {...}}    after the parameters changed
    {"hash": SHA-256, "updates": n}                      at the end

Faults are orders in the folder's `faults.json`: `{"update": 5, "rank": 2, "point": "backward", "signal": 9, "ranks": 3,
"delay": 0.003}`. The rank that comes first to the point at that update or later, as that rank (or any, where it is
null) of at least so many, sends itself the signal, which is as real from inside; with a delay another thread does.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

SEED = 7


class Samples(Dataset[Any]):
    """Vectors with their class and their number."""

    def __init__(self, count: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, width, generator=generator)
        self.y = torch.randint(10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Net(nn.Module):
    """Batch norm, dropout, and a point in the backward pass where a rank may end."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(hidden, 10)
        self.reach: Callable[[str], None] = lambda _point: None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.body(x)
        self.reach("forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.reach("backward"))
        return self.head(hidden)


class Log:
    """The lines of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"log.{os.getpid()}.jsonl").open("ab", buffering=0)

    def write(self, **values: Any) -> None:
        """Write a line."""
        self._file.write(json.dumps(values).encode() + b"\n")


class Faults:
    """What is to happen to this process."""

    def __init__(self, folder: Path) -> None:
        path = folder / "faults.json"
        self._folder = folder
        self._orders = list(enumerate(json.loads(path.read_text()) if path.exists() else []))
        self._trains = False
        self.context: Any = None

    def reach(self, point: str) -> None:
        """Let the faults happen that are due at a point."""
        for entry in [each for each in self._orders if each[1]["point"] == point]:
            number, order = entry
            if not self._is_due(order):
                continue
            with (self._folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if (self._folder / f"fault.{number}").exists():
                    self._orders.remove(entry)
                    continue
                if not self._others_train():  # whoever has the state last stays
                    continue
                self._orders.remove(entry)
                (self._folder / f"fault.{number}").touch()
                (self._folder / f"trains.{os.getpid()}").unlink(missing_ok=True)
            if order.get("delay"):
                threading.Timer(order["delay"], os.kill, (os.getpid(), order["signal"])).start()
            else:
                os.kill(os.getpid(), order["signal"])

    def note_update(self) -> None:
        """Note that this process has the state of the job."""
        if self._orders and not self._trains:
            self._trains = True
            (self._folder / f"trains.{os.getpid()}").touch()

    def _others_train(self) -> bool:
        own = f"trains.{os.getpid()}"
        return any(path.name != own for path in self._folder.glob("trains.*"))

    def _is_due(self, order: dict[str, Any]) -> bool:
        if self.context is None or committed(self.context) < order["update"]:
            return False
        size = self.context.world_size
        return size >= order["ranks"] and order["rank"] in (None, self.context.rank)

    def around(self, owner: Any, name: str, point: str, *, after: str = "") -> None:
        """Make a function a point, before and perhaps after."""
        function = getattr(owner, name)

        def reached(*args: Any, **kwargs: Any) -> Any:
            self.reach(point)
            result = function(*args, **kwargs)
            if after:
                self.reach(after)
            return result

        setattr(owner, name, reached)


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of weights and buffers."""
    summary = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        summary.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return summary.hexdigest()


def mark_recovery(faults: Faults) -> None:
    """Let faults happen inside of what a job does to recover, too."""
    from phalanx.checkpoint import saving
    from phalanx.parallel.data import replica_round
    from phalanx.parallel.elastic import meeting, recovery, shard_recovery

    faults.around(replica_round, "_all_reduce", "reduce")
    faults.around(replica_round, "exchange_sums", "reduce")
    faults.around(recovery.ElasticRecovery, "_commit", "commit", after="committed")
    faults.around(recovery, "exchange_progress", "recover", after="agreed")
    faults.around(recovery.ElasticRecovery, "_continue", "formed", after="recovered")
    faults.around(meeting, "send_state", "send", after="sent")
    faults.around(meeting, "receive_state", "receive", after="received")
    faults.around(shard_recovery.ShardRecovery, "share_update", "share", after="shared")
    faults.around(shard_recovery.ShardRecovery, "send", "reshard", after="resharded")
    faults.around(saving, "write_manifest", "write", after="written")


def train(args: argparse.Namespace, log: Log) -> None:
    """Train with us."""
    import phalanx as px

    faults = Faults(args.folder)
    torch.manual_seed(SEED)
    net = Net(args.width, args.hidden)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = Samples(args.samples, args.width)
    strategy = px.DistributedStrategy(sharding=args.sharding, sharding_configs={"mirror": args.mirror})
    model, optimizer, loader = px.distribute(
        net, optimizer, data, global_batch=args.batch, seed=SEED, strategy=strategy
    )
    scheduler = px.follow_updates(torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.7))
    first, folder = 0, args.folder / "checkpoints"
    if args.resume and folder.exists():
        first = px.load(folder, model, optimizer, loader, scheduler=scheduler).step or 0
    net.reach = faults.reach
    mark_recovery(faults)
    optimizer.register_step_pre_hook(lambda *_: faults.reach("optimizer"))
    faults.context = context = px.init()
    is_first, ids = True, {}
    while loader.epoch < args.epochs:
        for x, y, numbers in loader:
            update = first + committed(context)
            faults.reach("load")
            time.sleep(args.pause)
            replica = context.replicas.current if context.replicas is not None else 0
            ids[replica] = numbers.tolist()
            log.write(computes=update, replica=replica, ids=ids[replica])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if is_first:
                log.write(first=time.time())
                is_first = False
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            faults.reach("step")
            optimizer.step()
            scheduler.step()
            if px.has_updated(optimizer):
                log.write(update=update, time=time.time(), ids=ids)
                ids = {}
                faults.note_update()
                faults.reach("updated")
                if args.save_every and not (update + 1) % args.save_every:
                    faults.reach("save")
                    px.save(folder, model, optimizer, loader, scheduler=scheduler, keep=2, step=update + 1)
                    faults.reach("saved")
    faults.reach("end")
    log.write(hash=digest(model), updates=committed(context))


def committed(context: Any) -> int:
    """Return the updates that the job has made."""
    return 0 if context.recovery is None else context.recovery.committed


def arguments() -> argparse.Namespace:
    """Parse."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each pass of the loop sleeps")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="begin with the newest checkpoint of the folder, if any")
    parser.add_argument("--sharding", action="store_true", help="shard optimizer state (ZeRO 1)")
    parser.add_argument("--mirror", type=int, default=0, help="1: with a mirror of each shard")
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = arguments()
    log = Log(args.folder)
    log.write(start=started_at(os.getpid()), member=os.environ.get("PHALANX_MEMBER_ID", ""))
    faulthandler.register(signal.SIGUSR1)  # for a job that does not end
    torch.set_num_threads(1)
    train(args, log)


def started_at(pid: int) -> float:
    """Return when a process began, in seconds since 1970."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK")) if boot else 0.0


if __name__ == "__main__":
    main()
