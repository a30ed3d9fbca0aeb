"""One rank of a job of the soak that saves all the time: weights that say which step they are of.

Lines of JSON in `log.PID.jsonl`: {"began": step}, {"saved": step}, {"refused": step, "why": ...}.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import phalanx as px
from phalanx.errors import BackendError

WIDTH = 60


def main() -> None:
    """Save, again and again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--saves", type=int, default=60)
    parser.add_argument("--background", action="store_true")
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # for a job that does not end
    torch.set_num_threads(1)
    file = (args.folder / f"log.{os.getpid()}.jsonl").open("ab", buffering=0)

    def write(**values: Any) -> None:
        file.write(json.dumps(values).encode() + b"\n")

    context = px.init()
    model = nn.Linear(WIDTH, WIDTH)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, _ = px.distribute(model, optimizer)
    first = px.load(args.disk, model).step + 1 if any(args.disk.glob("step-*")) else 0
    write(start=first, rank=context.rank)
    for step in range(first, args.saves):
        nn.init.constant_(next(model.parameters()), step)
        write(began=step)
        try:
            px.save(args.disk, model, optimizer, step=step, keep=2, background=args.background)
            if not args.background:
                write(saved=step)
        except BackendError as error:
            write(refused=step, why=str(error))
        time.sleep(0.01)
    write(end=args.saves)


if __name__ == "__main__":
    main()
