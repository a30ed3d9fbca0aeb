"""One process of a parameter-server job of the soak: counts in a table, so that each lost or doubled update shows.

Row i is minus the number of updates of id i. Each process writes lines of JSON to `log.PID.jsonl` at once:

    {"kind": "worker", "rank": 1, "attempt": 0}   when it began
    {"started": step, "ids": [...]}               before an update is sent
    {"acknowledged": step}                        when the servers have acknowledged all up to this step
    {"saved": step}                               when a snapshot is complete
    {"rows": [...], "is_whole": true}             worker 0: the table at the end, and whether rows have equal values
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import phalanx as px
from phalanx import fleet
from phalanx.errors import PhalanxError
from phalanx.parallel.tables import tables_of
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.update_rules import SGD


@dataclass(frozen=True, slots=True)
class Counts:
    """A table of counts, and how many of them an update names."""

    rows: int
    ids: int
    table: TableSpec

    def ids_of(self, rank: int, step: int) -> np.ndarray:
        """Return the ids of an update."""
        return np.random.default_rng([rank, step]).choice(self.rows, size=self.ids, replace=False).astype(np.int64)


RESIDENT = Counts(60, 12, TableSpec(name="rows", dim=1, rule=SGD(lr=1.0), init=Constant(0.0)))
SPILLED = Counts(
    4000, 200, TableSpec(name="rows", dim=64, rule=SGD(lr=1.0), init=Constant(0.0), max_bytes=2000 * 32 + 300 * 256)
)
"""Two servers with 2000 rows each, of which memory holds 300."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "sync": {"a_sync": False},
    "async": {"a_sync": True},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 4}},
}


def counts_of(*, is_spilled: bool) -> Counts:
    """Return the table of a job."""
    return SPILLED if is_spilled else RESIDENT


def train(args: argparse.Namespace, rank: int, strategy: fleet.DistributedStrategy, write: Any) -> None:
    """Send updates, and wait for acknowledgements now and then."""
    client = tables_of(px.init(), strategy)
    mode = client.mode
    counts = counts_of(is_spilled=args.spilled)
    name = counts.table.name
    ones = np.ones((counts.ids, counts.table.dim), np.float32)
    mode.declare([counts.table])
    for step in range(args.steps):
        ids = counts.ids_of(rank, step)
        mode.pull([PullSpec(name, ids)]).rows()
        write(started=step, ids=ids.tolist())
        mode.push([TableUpdate(name, ids, ones)])
        time.sleep(args.pause)
        if not (step + 1) % args.flush_every:
            mode.flush()
            write(acknowledged=step)
        if rank == 0 and args.save_every and not (step + 1) % args.save_every:
            try:
                mode.store.save(args.folder / "snapshot", {"step": step})
                write(saved=step)
            except PhalanxError as error:  # a server was killed in it: the snapshot before stays
                write(not_saved=step, why=str(error))
    client.finish()
    write(acknowledged=args.steps - 1)
    (args.folder / f"done.{rank}").touch()
    if rank == 0:
        while any(not (args.folder / f"done.{other}").exists() for other in range(px.current().world_size)):
            time.sleep(0.01)
        (rows,) = mode.store.pull([PullSpec(name, np.arange(counts.rows))], step=mode.pushes).rows()
        write(rows=rows[:, 0].tolist(), is_whole=bool((rows == rows[:, :1]).all()))


def main() -> None:
    """Serve, or train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mode", choices=STRATEGIES, required=True)
    parser.add_argument("--spilled", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.004)
    parser.add_argument("--flush-every", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=0)
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # for a job that does not end
    file = (args.folder / f"log.{os.getpid()}.jsonl").open("ab", buffering=0)

    def write(**values: Any) -> None:
        file.write(json.dumps(values).encode() + b"\n")

    role = px.cluster.Role.detect()
    write(kind=role.kind, rank=role.rank, attempt=role.attempt)
    strategy = fleet.DistributedStrategy(**STRATEGIES[args.mode])
    fleet.init(strategy=strategy)
    if role.is_server:
        fleet.init_server()
        fleet.run_server()
    else:
        train(args, role.rank, strategy, write)


if __name__ == "__main__":
    main()
