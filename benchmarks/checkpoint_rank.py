"""One rank of `bench_checkpoint`: the same state saved and loaded by us and by torch's DCP, in one process, in turn."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import phalanx as px

CASES = ("save", "load", "stall")


def build(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an Adam with state, together of this size."""
    width = 1024
    layers = max(1, megabytes * 2**20 // (3 * 4 * width * width))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Peer:
    """torch's DCP, as its documentation uses it."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        # Its thread would otherwise take part in the collectives of training.
        self.group = dist.new_group(backend="gloo")

    def _state(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self) -> None:
        """Save and wait for the disk."""
        dcp.save(self._state(), checkpoint_id=self.folder)

    def start(self) -> Callable[[], object]:
        """Begin a save in the background; returns how to wait for it."""
        return dcp.async_save(self._state(), checkpoint_id=self.folder, process_group=self.group).result

    def load(self) -> None:
        """Load in place."""
        state = self._state()
        dcp.load(state, checkpoint_id=self.folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Ours(Peer):
    """The same by `px.save` and `px.load`."""

    def save(self) -> None:  # noqa: D102 (as above)
        px.save(self.folder, self.model, self.optimizer, step=0)

    def start(self) -> Callable[[], object]:  # noqa: D102
        px.save(self.folder, self.model, self.optimizer, step=0, background=True)
        return px.checkpoint.wait

    def load(self) -> None:  # noqa: D102
        px.load(self.folder, self.model, self.optimizer)


def measure(case: str, side: Peer) -> float:
    """Return the seconds of one run: of the call, which for `stall` returns before the files are written."""
    if case != "load" and dist.get_rank() == 0:
        shutil.rmtree(side.folder, ignore_errors=True)
    dist.barrier()
    started = time.perf_counter()
    finish = None
    if case == "save":
        side.save()
    elif case == "load":
        side.load()
    else:
        finish = side.start()
    dist.barrier()
    seconds = time.perf_counter() - started
    if finish is not None:
        finish()
    dist.barrier()
    return seconds


def main() -> None:
    """Measure pairs of every case; rank 0 prints them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--cases", required=True)
    args = parser.parse_args()
    px.init(backend="gloo")
    torch.manual_seed(0)
    model, optimizer = build(args.megabytes)
    sides = {"ours": Ours(args.folder / "ours", model, optimizer), "peer": Peer(args.folder / "dcp", model, optimizer)}
    found: dict[str, list[dict[str, float]]] = {}
    for case in args.cases.split(","):
        if case == "load":
            for side in sides.values():
                measure("save", side)
        for side in sides.values():
            measure(case, side)  # the first of each makes memory, imports and threads
        for pair in range(args.pairs):
            order = list(sides) if pair % 2 == 0 else list(sides)[::-1]
            found.setdefault(case, []).append({name: measure(case, sides[name]) for name in order})
    if dist.get_rank() == 0:
        state_bytes = sum(3 * param.nbytes for param in model.parameters())
        print("FIGURE " + json.dumps({"bytes": state_bytes, "pairs": found}))
    sys.stdout.flush()
    dist.barrier()
    # gloo's threads can hang or abort the interpreter's own shutdown.
    os._exit(0)


if __name__ == "__main__":
    main()
