"""`FlightLog`: a few hundred bytes for each update of each rank, enough to do the update again and compare it.

A line holds the loader's epoch, position and seed, from which the samples follow, or their indices; the losses; and
digests of gradients by bucket: of each logical replica's own before they are added up, and of the sum. Two files of
bounded size follow each other. The log is begun by the launcher's entry (`--flight-log`), and written after each
optimizer step that updates.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from phalanx.comm import context
from phalanx.parallel.observe.losses import watch_losses
from phalanx.parallel.observe.sample_ids import sample_ids
from phalanx.parallel.session import parameter_name, session

MOST_BYTES = 8 << 20
"""Of one file; then it is renamed to `.1`, and another begins."""

_BUCKET_BYTES = 25 << 20
_MOST_IDS = 64
_MOST_LOSSES = 64
"""Of one update, the last ones."""


class FlightLog:
    """The log of this process; does nothing until it is begun."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._size = 0
        self.step = 0
        """Updates so far, over all runs that this one continues."""

        self.loaded_step: int | None = None
        """Updates in the checkpoint that is loaded, where somebody knows; looked up by its path otherwise."""

        self.after_update: Callable[[int], None] | None = None
        """Called with the number of updates after each line."""

        self._losses: deque[Tensor] = deque(maxlen=_MOST_LOSSES)
        self._local: dict[int, list[Tensor | int]] = {}
        self._names: list[list[str]] = []
        self._headers: dict[str, bytes] = {}
        """What every file begins with."""

        self._reduced: list[Tensor | int] = []
        self._groups: WeakKeyDictionary[Optimizer, tuple[list[int], list[list[Tensor]]]] = WeakKeyDictionary()
        """Sizes of an optimizer's parameter groups, and its parameters by bucket."""

    @property
    def is_on(self) -> bool:
        """Whether it was begun."""
        return self._path is not None

    def begin(self, path: Path) -> None:
        """Log every update of this process to a file from now on."""
        if self.is_on:
            return
        self._path = path
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._size = path.stat().st_size if path.exists() else 0
        watch_losses(lambda loss: self._losses.append(loss.detach()))
        sample_ids.watch()
        session.on_bucket = self.note_bucket
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self.write(
            {
                "kind": "begin",
                "time": round(time.time(), 3),
                "attempt": int(os.environ.get("PHALANX_ATTEMPT", "0")),
                "world": int(os.environ.get("PHALANX_WORLD_SIZE", "1")),
                "rank": int(os.environ.get("PHALANX_RANK", "0")),
                "seed": torch.initial_seed(),
                "script": [*sys.argv],
                "folder": os.getcwd(),
            }
        )

    def note_bucket(self, _index: int, names: Sequence[str], flat: Tensor) -> None:
        """Take the digest of a bucket of the replica at hand, before it is added up over the ranks."""
        replicas = context.current().replicas
        replica = context.current().readers.index if replicas is None or replicas.current is None else replicas.current
        digests = self._local.setdefault(replica, [])
        digests.append(word_sum(flat))
        if len(self._names) < len(digests):  # in the first update
            self._names.append([names[0], names[-1]] if names else [])

    def note_checkpoint(self, path: Path, *, is_loaded: bool, step: int) -> None:
        """Log that the state after the last update is in a checkpoint, or was read from one."""
        if not self.is_on:
            return
        if is_loaded:
            self.step = self._updates_at(path, step) if self.loaded_step is None else self.loaded_step
        kind = "loaded" if is_loaded else "saved"
        self.write({"kind": kind, "step": self.step, "path": str(path.resolve())})

    def write(self, entry: dict[str, Any]) -> None:
        """Append a line, unless the disk is full: a log is not worth a training."""
        if self._path is None:
            return
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        if entry["kind"] in ("begin", "buckets"):
            self._headers[entry["kind"]] = line
        try:
            if self._size + len(line) > MOST_BYTES:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                line, self._size = b"".join(self._headers.values()) + line, 0
            with open(self._path, "ab", buffering=0) as file:
                self._size += file.write(line)
        except OSError:
            return

    def _updates_at(self, path: Path, step: int) -> int:
        """Return after how many updates a checkpoint was saved, as this job logged it; its own number otherwise."""
        assert self._path is not None
        earlier = sorted(self._path.parent.glob(f"attempt-*/{self._path.name}"))
        entries = [entry for file in (*earlier, self._path) for entry in read_flight_log(file)]
        for entry in reversed(entries):
            if entry["kind"] == "saved" and entry["path"] == str(path.resolve()):
                return int(entry["step"])
        return step

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        if torch.compiler.is_compiling() or session.is_trial:
            return
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        before, groups = self._groups.get(optimizer, ([], []))
        if sizes != before:  # in the first step, or after add_param_group
            groups = _grouped(optimizer)
            self._groups[optimizer] = sizes, groups
        self._reduced += [_sum_of_words([_local_part(p.grad) for p in group if p.grad is not None]) for group in groups]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        if torch.compiler.is_compiling() or session.is_trial:
            return
        loader = session.loader
        entry: dict[str, Any] = {"kind": "step", "step": self.step}
        if loader is not None and not loader.has_batch_sampler:
            state = loader.state_dict()
            entry |= {name: state[name] for name in ("epoch", "position", "seed", "global_batch")}
        elif (ids := sample_ids.current()) is not None:
            entry["samples"] = compressed(ids)
        entry["loss"] = [_plain(float(loss)) for loss in self._losses if loss.numel() == 1]
        entry["local"] = {str(r): [_number(d) for d in digests] for r, digests in sorted(self._local.items())}
        entry["sum"] = [_number(digest) for digest in self._reduced]
        if "buckets" not in self._headers:
            replicas = context.current().replicas if context.is_initialized() else None
            self.write(
                {
                    "kind": "buckets",
                    "names": self._names,
                    "groups": self._group_names(optimizer),
                    # Replicas that were ranks come back with the checkpoint from which a replay begins.
                    "replicas": None if replicas is None or replicas.were_ranks else replicas.count,
                    "threads": torch.get_num_threads(),
                }
            )
        self.write(entry)
        self._losses.clear()
        self._local, self._reduced = {}, []
        self.step += 1
        if self.after_update is not None:
            self.after_update(self.step)

    def _group_names(self, optimizer: Optimizer) -> list[list[str]]:
        _, groups = self._groups.get(optimizer, ([], []))
        return [[parameter_name(p) or f"parameter {list(p.shape)}" for p in (group[0], group[-1])] for group in groups]


flight_log = FlightLog()
"""This process's own."""


def flight_file(folder: str | Path, rank: int) -> Path:
    """Return the log of a rank in the log folder of its job."""
    return Path(folder) / f"flight.{rank}.jsonl"


def begin_flight_log() -> None:
    """Log the updates of this process beside its other logs."""
    flight_log.begin(flight_file(os.environ["PHALANX_LOG_DIR"], int(os.environ.get("PHALANX_RANK", "0"))))


def word_sum(tensor: Tensor) -> Tensor | int:
    """Return the sum of the words of a tensor's memory, modulo 2**64; one that changed always shows.

    On a device it stays there, so that nobody waits for it now.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    count = data.numel() // 8 * 8
    rest = int.from_bytes(bytes(data[count:].cpu().tolist()), "little")
    if data.is_cpu:  # NumPy reads words that begin anywhere
        return (int(np.add.reduce(data.numpy()[:count].view(np.int64))) + rest) & (1 << 64) - 1
    words = data[:count] if data.storage_offset() % 8 == 0 else data[:count].clone()
    total: Tensor = words.view(torch.int64).sum() + rest
    return total


def _sum_of_words(tensors: Sequence[Tensor]) -> Tensor | int:
    """Return one number for several tensors, which also tells their order."""
    total: Tensor | int = 0
    for index, tensor in enumerate(tensors, 1):
        total = total + word_sum(tensor) * (2 * index + 1)
    return total


def _number(digest: Tensor | int) -> str:
    return f"{(int(digest) & (1 << 64) - 1):x}"


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _local_part(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.coalesce().values() if local.is_sparse else local


def _grouped(optimizer: Optimizer) -> list[list[Tensor]]:
    """Return the parameters of an optimizer in groups of some MiB, in order."""
    groups: list[list[Tensor]] = []
    size = _BUCKET_BYTES
    for group in optimizer.param_groups:
        for param in group["params"]:
            if size >= _BUCKET_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(param)
            size += param.numel() * param.element_size()
    return groups


def compressed(ids: Sequence[int]) -> list[int] | str:
    """Return dataset indices in few bytes: as `start:stop:step` if they are a range, else the first ones."""
    if len(ids) > 2 and len({later - earlier for earlier, later in pairwise(ids)}) == 1:
        return f"{ids[0]}:{ids[-1] + (1 if ids[1] > ids[0] else -1)}:{ids[1] - ids[0]}"
    return list(ids[:_MOST_IDS])


def read_flight_log(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a log, older file first; a last line that was cut off counts as none."""
    entries = []
    for part in (path.with_name(f"{path.name}.1"), path):
        if part.exists():
            for line in part.read_text(errors="replace").splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if isinstance(entry, dict) and "kind" in entry:
                    entries.append(entry)
    return entries
