"""One rank of the peers of `bench_elastic`: DDP under torchrun with checkpoints, and torchft on gloo.

Writes the lines of `elastic_rank`. Both do what their documentation says, and a little more for exactness: checkpoints
keep random state, and torchft's ranks read the batch of the manager's step, so that a step that was not committed is
tried again on the same samples.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.elastic_models import SEED, Net, Samples, digest
from benchmarks.elastic_rank import Log, started_at


def rows_of(update: int, args: argparse.Namespace, rank: int) -> Tensor:
    """Return the numbers of the samples of a rank in a global batch: a new order each epoch, cut over the ranks."""
    per_epoch = args.samples // args.batch
    epoch, index = divmod(update, per_epoch)
    order = torch.randperm(args.samples, generator=torch.Generator().manual_seed(SEED + epoch))
    return order[index * args.batch : (index + 1) * args.batch][rank :: args.ranks]


def batch_of(data: Samples, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return samples and classes."""
    return data.x[rows], data.y[rows]


class Checkpoint:
    """A file for all ranks, written by rank 0, and random state by rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._rank = folder / "checkpoint", rank
        self._path.mkdir(exist_ok=True)

    def save(self, update: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Save; a step is complete once all ranks have written."""
        state: dict[str, Any] = {"rng": torch.get_rng_state()}
        if self._rank == 0:
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        part = self._path / f"{update}.{self._rank}"
        torch.save(state, part.with_suffix(f".{self._rank}.part"))
        part.with_suffix(f".{self._rank}.part").rename(part)

    def load(self, ranks: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest complete checkpoint; return its update, 0 without one."""
        steps = {int(path.name.split(".")[0]) for path in self._path.iterdir() if path.suffix != ".part"}
        for update in sorted(steps, reverse=True):
            if all((self._path / f"{update}.{rank}").exists() for rank in range(ranks)):
                state = torch.load(self._path / f"{update}.0", weights_only=True)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                torch.set_rng_state(torch.load(self._path / f"{update}.{self._rank}", weights_only=True)["rng"])
                return update
        return 0


def with_ddp(args: argparse.Namespace, log: Log) -> None:
    """Train with DDP, from the newest checkpoint on."""
    # Through torchrun's own store the ranks of a second start find addresses of the first (torch 2.13, gloo).
    meeting = f"file://{args.folder}/meeting.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    rank, data = int(os.environ["RANK"]), Samples(args.samples, args.width)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.ranks)
    torch.manual_seed(SEED)
    net = Net(args.width, args.hidden)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch.manual_seed(SEED + 1 + rank)
    checkpoint = Checkpoint(args.folder, rank)
    first = checkpoint.load(args.ranks, net, optimizer)
    model = nn.parallel.DistributedDataParallel(net)
    for update in range(first, args.updates):
        rows = rows_of(update, args, rank)
        x, y = batch_of(data, rows)
        time.sleep(args.pause)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log.write(update=update, time=time.time(), ids={rank: rows.tolist()})
        if args.save_every and not (update + 1) % args.save_every:
            checkpoint.save(update + 1, net, optimizer)
            dist.barrier()
    log.write(hash=digest(net) if rank == 0 else "", updates=args.updates)


def with_torchft(args: argparse.Namespace, log: Log) -> None:
    """Train as one replica group of one rank, as torchft's train_ddp.py does."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

    rank, data = args.rank, Samples(args.samples, args.width)
    torch.manual_seed(SEED)
    net = Net(args.width, args.hidden)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch.manual_seed(SEED + 1 + rank)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    patience = timedelta(seconds=args.patience)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=patience,
        connect_timeout=patience,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"rank_{rank}",
    )
    model, managed = DistributedDataParallel(manager, net), Optimizer(manager, optimizer)
    is_first = True
    for update in _steps(manager, args.updates):
        rows = rows_of(update, args, rank)
        x, y = batch_of(data, rows)
        time.sleep(args.pause)
        managed.zero_grad()  # starts the quorum, in which the step may change
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        managed.step()
        if manager.current_step() == update + 1:
            log.write(update=update, time=time.time(), ids={rank: rows.tolist()})
            if is_first:
                log.write(first=time.time())
                is_first = False
    log.write(hash=digest(net), updates=args.updates)
    manager.shutdown(wait=False)


def _steps(manager: Any, updates: int) -> Iterator[int]:
    while manager.current_step() < updates:
        yield manager.current_step()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("ddp", "torchft"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--pause", type=float, required=True)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--patience", type=float, default=2.0)
    args = parser.parse_args()
    log = Log(args.folder)
    log.write(start=started_at(os.getpid()), member=f"rank {os.environ.get('RANK', args.rank)}")
    torch.set_num_threads(1)
    {"ddp": with_ddp, "torchft": with_torchft}[args.engine](args, log)
    os._exit(0)  # threads of gloo and of managers hang or abort the interpreter's own end


if __name__ == "__main__":
    main()
