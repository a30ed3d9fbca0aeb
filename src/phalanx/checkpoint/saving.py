"""`px.save`: every rank writes its shards; the checkpoint is marked complete when all are on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import operator
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.checkpoint import background as background_saves
from phalanx.checkpoint.background import copy_to_host
from phalanx.checkpoint.folder.checkpoint_folder import clean, next_numbers, prune, step_folder, sweep
from phalanx.checkpoint.folder.manifest import write_manifest
from phalanx.checkpoint.ranks import Ranks, is_elastic
from phalanx.checkpoint.replay import replay_request
from phalanx.checkpoint.state.capture import RankState, TrainingState, capture
from phalanx.checkpoint.state.tables import save_tables
from phalanx.checkpoint.tensors.chunk import TensorChunk
from phalanx.checkpoint.tensors.names import inner
from phalanx.checkpoint.tensors.safetensors_file import write_tensors
from phalanx.checkpoint.tensors.write_plan import ChunkDescription, TensorLayout, plan_writes
from phalanx.comm import context
from phalanx.errors import ConfigError, PeerLostError
from phalanx.files import sync_directory
from phalanx.parallel.checks.consistency import make_consistent
from phalanx.parallel.observe.flight_log import flight_log
from phalanx.parallel.optim.ema import EMA, kept_average
from phalanx.parallel.update.sharded_optimizer import whole_state

logger = logging.getLogger("phalanx.checkpoint")

_FILES = (".pdparams", ".pdopt")
"""Suffixes of the files in which Paddle scripts save parameters and optimizers separately."""

WRITE_TIMEOUT_S = 1800.0
"""Seconds to wait for the rank whose disk is slowest."""


def save(
    folder: str | Path,
    model: Any,
    optimizer: Any = None,
    loader: Any = None,
    *,
    scheduler: Any = None,
    ema: EMA | None = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
    keep: int | None = None,
) -> Path:
    """Write a checkpoint `<folder>/step-<step>`, from which `px.load` resumes at any number of ranks.

    Collective: every rank calls it, at the same step. It holds parameters, buffers, optimizer, scheduler and loader
    state, the random generators of every rank, the state of techniques, and tables of parameter servers. A tensor
    that several ranks hold is written once, split over them: parameters and optimizer state are compared first, and
    buffers synchronised. A checkpoint counts only once all of it is on disk: a save that is killed or fails leaves
    the previous ones intact.

    Args:
        folder: Folder of checkpoints, visible to all ranks; created if missing. One job writes to it at a time.
        model: The model, wrapped or not. Names are those of the plain model.
        optimizer: The optimizer over its parameters.
        loader: The loader that `px.distribute` returned. Inside the loop the current batch counts as done.
        scheduler: A learning-rate scheduler.
        ema: A running average of the weights (`px.EMA`); that of `strategy.ema` when omitted.
        step: Number of the checkpoint; one more than the highest there when omitted.
        extra: Anything else, as numbers, text, tensors, lists, tuples, dicts; `px.load(...).extra` returns it.
        background: Return once the state is copied to host memory, and write it while training continues. The next save
            waits for it and raises its error, as `px.checkpoint.wait()` does.
        keep: How many checkpoints to keep in the folder; all when omitted.

    In an elastic job every rank has all of the state, but for shards of optimizer state, which rank 0 gathers, and rank
    0 writes it alone: a rank that is lost during a save costs at most that save.

    Returns:
        The folder of the checkpoint. In an elastic job, on ranks other than 0 and without `step`, the folder of all.

    Raises:
        ConfigError: If something cannot be saved, or ranks differ in parameters or arguments; on all ranks.
        BackendError: If a file system does not take the files, on whichever rank; on all ranks.
        PeerLostError: If a rank did not arrive; names it.
    """
    if Path(folder).suffix in _FILES and not Path(folder).is_dir():
        raise ConfigError(
            f"px.save writes a folder of checkpoints, model and optimizer together, found the name of a file: "
            f"{str(folder)!r}. Give px.save and px.load {str(Path(folder).with_suffix(''))!r}, or write weights alone "
            f"with px.export_state_dict(model, {str(Path(folder).with_suffix('.pdparams'))!r})."
        )
    training = TrainingState(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, ema=ema)
    return save_training(folder, training, step=step, extra=extra, background=background, keep=keep)


def save_training(
    folder: str | Path,
    training: TrainingState,
    *,
    step: int | None,
    extra: Mapping[str, Any] | None,
    background: bool,
    keep: int | None,
) -> Path:
    """Save as `save` does, objects that were checked before. Collective."""
    step, keep = check_count("step", step, least=0), check_count("keep", keep, least=1)
    if replay_request() is not None:
        return Path(folder)  # a replay changes nothing of the run
    _check_round()
    background_saves.wait()
    with whole_state(training.optimizer) as has_all:
        if is_elastic() and context.current().rank == 0 and not has_all:
            logger.warning("rank 0 was lost while it gathered the state of the optimizer: this checkpoint is left out")
            return Path(folder) if step is None else step_folder(Path(folder), step)
        return _save(folder, training, step=step, extra=extra, background=background, keep=keep)


def _save(
    folder: str | Path,
    training: TrainingState,
    *,
    step: int | None,
    extra: Mapping[str, Any] | None,
    background: bool,
    keep: int | None,
) -> Path:
    started = time.perf_counter()
    if is_elastic():
        if context.current().rank != 0:
            return Path(folder) if step is None else step_folder(Path(folder), step)
        ranks = Ranks.alone()
    else:
        terms = {"folder": str(folder), "step": step, "background": background, "keep": keep}
        ranks = Ranks.meet("px.save", terms)
        make_consistent(training.model, "px.save", training.optimizer)
    if training.ema is None:
        training = replace(training, ema=kept_average(inner(training.model)))
    save = _begin(ranks, Path(folder), step, training, extra)
    save_tables(ranks, save.path / f"tables-{save.name}", training.model)
    writing = SaveTask(ranks, save, keep, training, started)
    if background:
        writing.copy()
        background_saves.start(writing.run)
        logger.info("checkpoint %s: copied in %.3f s, writing it now", save.path, time.perf_counter() - started)
    else:
        writing.run()
    flight_log.note_checkpoint(save.path, is_loaded=False, step=save.step)
    return save.path


def is_between_replicas() -> bool:
    """Return whether gradients of some replicas of a global batch were computed, and the parameters not updated."""
    replicas = context.current().replicas if context.is_initialized() else None
    return replicas is not None and replicas.are_shared and replicas.is_round_open


def _check_round() -> None:
    """Raise between two replicas of one global batch: the position would be that of its start, and the buffers not."""
    if is_between_replicas():
        raise ConfigError(
            "px.save was called between two logical replicas of one global batch. Save after an update: "
            "if px.has_updated(optimizer): px.save(...)."
        )


def check_count(name: str, value: Any, *, least: int) -> int | None:
    """Return a count as a Python int; None stays None.

    Raises:
        ConfigError: If it is no integer, or less than `least`.
    """
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigError(f"asked for {name}={value!r}. Give a whole number, {least} or more.")
    return number


@dataclass(frozen=True)
class PendingSave:
    """A save that all ranks have agreed on and not yet written."""

    parent: Path
    path: Path
    name: str
    step: int
    sequence: int
    layout: dict[str, TensorLayout]
    rank_state: RankState


class _LayoutCache:
    """The layout of the previous save: it seldom changes, so ranks send theirs again only when it does."""

    def __init__(self) -> None:
        self.digest = ""
        self.by_rank: list[dict[str, ChunkDescription]] = []
        self.layout: dict[str, TensorLayout] = {}


_layout_cache = _LayoutCache()


def _begin(
    ranks: Ranks, parent: Path, step: int | None, training: TrainingState, extra: Mapping[str, Any] | None
) -> PendingSave:
    states: list[RankState] = []
    digest = ""

    def collect() -> list[Any]:
        nonlocal digest
        states.append(capture(training, extra))
        parts = {name: local.part.to_json() for name, local in states[0].local_tensors.items()}
        digest = hashlib.sha256(json.dumps([ranks.world_size, parts]).encode()).hexdigest()
        return [None if digest == _layout_cache.digest else parts]

    def decide(answers: list[Any]) -> dict[str, Any]:
        is_new = any(answer[0] is not None for answer in answers)
        if is_new:
            if len(_layout_cache.by_rank) != len(answers):
                _layout_cache.by_rank = [{} for _ in answers]
            for rank, (parts,) in enumerate(answers):
                if parts is not None:
                    _layout_cache.by_rank[rank] = {
                        name: ChunkDescription.from_json(part) for name, part in parts.items()
                    }
        layout = plan_writes(_layout_cache.by_rank) if is_new else None
        folders = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        for folder in folders:
            sync_directory(folder.parent)
        sweep(parent)
        sequence, following = next_numbers(parent)
        number = following if step is None else step
        step_folder(parent, number).mkdir(exist_ok=True)
        return {
            "layout": None if layout is None else {name: entry.to_json() for name, entry in layout.items()},
            "step": number,
            "sequence": sequence,
            "save": secrets.token_hex(4),
        }

    try:
        decision = ranks.decide("begin", collect, decide)
    except BaseException:
        _layout_cache.digest, _layout_cache.by_rank = "", []
        raise
    if decision["layout"] is not None:
        _layout_cache.layout = {name: TensorLayout.from_json(entry) for name, entry in decision["layout"].items()}
    _layout_cache.digest = digest
    return PendingSave(
        parent,
        step_folder(parent, decision["step"]),
        decision["save"],
        decision["step"],
        decision["sequence"],
        _layout_cache.layout,
        states[0],
    )


class SaveTask:
    """The part of a save that may run in a thread: write this rank's file, report, and mark the checkpoint complete."""

    def __init__(
        self, ranks: Ranks, save: PendingSave, keep: int | None, training: TrainingState, started: float
    ) -> None:
        self._ranks, self._save, self._keep, self._started = ranks, save, keep, started
        self._words = training.words
        self._path = save.path / f"rank-{ranks.rank}-{save.name}.safetensors"
        write_items = list(_items_to_write(ranks.rank, save))
        self._chunks = [(name, chunk) for name, chunk, _ in write_items]
        self._tensors = {_key(name, chunk, save.layout[name]): tensor for name, chunk, tensor in write_items}

    def copy(self) -> None:
        """Copy the tensors to host memory, so that training may change them."""
        self._tensors = copy_to_host(self._tensors)

    def run(self) -> None:
        """Write, report, and wait until rank 0 has marked the checkpoint complete.

        Collective.
        """
        try:
            self._ranks.decide("written", self._write, self._commit, timeout_s=WRITE_TIMEOUT_S)
        except PeerLostError:
            raise  # this rank cannot tell whether it is complete; the next save sweeps up if it is not
        except Exception:
            if self._ranks.rank == 0:
                with contextlib.suppress(OSError):  # the next save sweeps again; the original error matters more
                    sweep(self._save.parent)
            raise
        if self._ranks.rank == 0:
            size = sum(tensor.nbytes for tensor in self._tensors.values())
            seconds = time.perf_counter() - self._started
            logger.info("checkpoint %s: complete in %.2f s; rank 0 wrote %d bytes", self._save.path, seconds, size)

    def _write(self) -> dict[str, Any]:
        ready = {
            key: tensor.to("cpu").resolve_conj().resolve_neg().contiguous() for key, tensor in self._tensors.items()
        }
        written, begins = write_tensors(self._path, ready)
        write_items = [
            [name, chunk.offset, chunk.size, begin] for (name, chunk), begin in zip(self._chunks, begins, strict=True)
        ]
        return {
            "file": asdict(written),
            "pieces": write_items,
            "values": self._save.rank_state.values,
        }

    def _commit(self, reports: list[Any]) -> None:
        save = self._save
        for rank, report in enumerate(reports):
            if not (save.path / report["file"]["name"]).exists():
                raise ConfigError(
                    f"rank {rank} wrote {report['file']['name']} to {save.path}, where rank 0 does not see it. Name a "
                    "folder that all nodes share."
                )
        write_items: dict[str, list[Any]] = {name: [] for name in save.layout}
        for rank, report in enumerate(reports):
            for name, offset, size, begin in report["pieces"]:
                write_items[name].append([rank, offset, size, begin])
        # Compared as text: there 1 is not True, and NaN equals itself.
        texts = [json.dumps(report["values"]) for report in reports]
        unique = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        tables = f"tables-{save.name}"
        write_manifest(
            save.path,
            {"save": save.name, "sequence": save.sequence, "step": save.step},
            {
                "world_size": self._ranks.world_size,
                "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "holds": self._words,
                "files": [report["file"] for report in reports],
                "tensors": {name: [entry.dtype, entry.shape, write_items[name]] for name, entry in save.layout.items()},
                "values": {"unique": [*map(json.loads, unique)], "of_rank": [unique[text] for text in texts]},
                "tables": tables if (save.path / tables).exists() else None,
            },
        )
        clean(save.path, save.name)
        if self._keep is not None:
            prune(save.parent, self._keep)


def _items_to_write(rank: int, save: PendingSave) -> Iterator[tuple[str, TensorChunk, Tensor]]:
    """Yield what this rank writes: the tensor's name, the chunk, and its memory."""
    for name, local in save.rank_state.local_tensors.items():
        entry = save.layout[name]
        for item in entry.write_items:
            if item.rank == rank:
                yield name, item.chunk, local.tensor[item.chunk.within(entry.chunk_of(local.part))]


def _key(name: str, chunk: TensorChunk, entry: TensorLayout) -> str:
    """Return the name of a chunk in its file: the tensor's, with its slice if it is not all of it."""
    if chunk == TensorChunk.full(entry.shape):
        return name
    return f"{name}[{', '.join(f'{at}:{at + n}' for at, n in zip(chunk.offset, chunk.size, strict=True))}]"
