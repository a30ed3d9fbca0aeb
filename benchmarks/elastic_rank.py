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
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.elastic_models import Adversaries, OneModel, digest


class Log:
    """The lines of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"log.{os.getpid()}.jsonl").open("ab", buffering=0)

    def write(self, **values: Any) -> None:
        """Write a line."""
        self._file.write(json.dumps(values).encode() + b"\n")


class Faults:
    """What is to happen to this process."""

    def __init__(self, folder: Path, updates: Callable[[], int]) -> None:
        path = folder / "faults.json"
        self._folder, self._updates = folder, updates
        self._orders = list(enumerate(json.loads(path.read_text()) if path.exists() else []))
        self._newest = os.open(folder / "newest", os.O_RDWR | os.O_CREAT)
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
        if self._orders:
            os.pwrite(self._newest, f"{self._updates():8}".encode(), 0)
            if not self._trains:
                self._trains = True
                (self._folder / f"trains.{os.getpid()}").touch()

    def _others_train(self) -> bool:
        pids = [int(path.suffix[1:]) for path in self._folder.glob("trains.*")]
        return any(pid != os.getpid() and Path(f"/proc/{pid}").exists() for pid in pids)

    def _is_due(self, order: dict[str, Any]) -> bool:
        context = self.context
        if context is None or self._made(context) < order["update"]:
            return False
        return context.world_size >= order["ranks"] and order["rank"] in (None, context.rank)

    def _made(self, context: Any) -> int:
        """Return how many updates the training has made; one that joins is told by the others' file."""
        if context.recovery is None or not context.recovery.membership.is_joining:
            return self._updates()
        return int(os.pread(self._newest, 8, 0) or 0)

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


def mark_recovery(faults: Faults) -> None:
    """Let faults happen inside of what a job does to recover, too."""
    from phalanx.checkpoint import saving
    from phalanx.parallel.data.replicas import replica_reduction
    from phalanx.parallel.elastic import meeting, recovery, shard_recovery

    faults.around(replica_reduction, "_all_reduce", "reduce")
    faults.around(replica_reduction, "exchange_sums", "reduce")
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

    training = (Adversaries if args.adversaries else OneModel)(args)
    faults = Faults(args.folder, lambda: training.updates)
    faults.context = context = px.init()
    mark_recovery(faults)
    if args.resume:
        training.resume()
    for model, optimizer in zip(training.models, training.optimizers, strict=True):
        model.reach = faults.reach
        optimizer.register_step_pre_hook(lambda *_: faults.reach("optimizer"))
    is_first, ids = True, {}
    while training.loader.epoch < args.epochs:
        for x, y, numbers in training.loader:
            update = training.updates
            faults.reach("load")
            time.sleep(args.pause)
            replica = context.replicas.current if context.replicas is not None else 0
            ids[replica] = numbers.tolist()
            log.write(computes=update, replica=replica, ids=ids[replica])
            for optimizer in training.optimizers:
                optimizer.zero_grad()
            training.compute(x, y)
            if is_first:
                log.write(first=time.time())
                is_first = False
            faults.reach("step")
            training.update(faults.reach)
            if all(map(px.has_updated, training.optimizers)):
                log.write(update=update, time=time.time(), ids=ids)
                ids = {}
                faults.note_update()
                faults.reach("updated")
                if args.save_every and not (update + 1) % args.save_every:
                    faults.reach("save")
                    training.save()
                    faults.reach("saved")
    faults.reach("end")
    log.write(hash=digest(*training.models), updates=training.updates)


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
    parser.add_argument("--adversaries", action="store_true", help="two models with an optimizer each")
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
