"""`px.save`: write a checkpoint, every rank its part, and mark it complete when all of it is on disk."""

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
from phalanx.checkpoint.background import staged
from phalanx.checkpoint.folder.folder import clean, next_numbers, prune, step_folder, sweep
from phalanx.checkpoint.folder.manifest import write_manifest
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.state.capture import Captured, Training, capture
from phalanx.checkpoint.state.tables import save_tables
from phalanx.checkpoint.tensors.chunk import Box
from phalanx.checkpoint.tensors.file import write_tensors
from phalanx.checkpoint.tensors.names import inner
from phalanx.checkpoint.tensors.write_plan import Entry, Part, deal_out
from phalanx.errors import ConfigError, PeerLostError
from phalanx.files import sync_directory
from phalanx.parallel.checks.consistency import make_consistent
from phalanx.parallel.optim.ema import EMA, kept_average

logger = logging.getLogger("phalanx.checkpoint")

_FILES = (".pdparams", ".pdopt")
"""Endings of the files in which older scripts keep parameters and optimizers apart."""

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
    """Write a checkpoint `<folder>/step-<step>`, from which `px.load` goes on at any number of ranks.

    Collective: every rank calls it, at the same step. It holds parameters, buffers, optimizer, scheduler and loader
    state, the random generators of every rank, what techniques keep between steps, and tables of parameter servers. A
    tensor that several ranks hold is written once, split over them: parameters and optimizer state are compared first,
    and buffers synchronised. Until all of it is on disk it is no checkpoint: a
    save that is killed or fails leaves the ones before it as they are.

    Args:
        folder: Folder of checkpoints, seen by all ranks; made if missing. One job writes to it at a time.
        model: The model, wrapped or not. Names are those of the plain model.
        optimizer: The optimizer over its parameters.
        loader: The loader that `px.distribute` returned. Inside the loop the batch in hand counts as done.
        scheduler: A learning-rate scheduler.
        ema: A running average of the weights (`px.EMA`); that of `strategy.ema` when omitted.
        step: Number of the checkpoint; one more than the highest there when omitted.
        extra: Anything else, as numbers, text, tensors, lists, tuples, dicts; `px.load(...).extra` returns it.
        background: Return when the state is copied to memory and write it while training goes on. The next save waits
            for it and raises what went wrong with it, as `px.checkpoint.wait()` does.
        keep: How many checkpoints to keep in the folder; all when omitted.

    Returns:
        The folder of the checkpoint.

    Raises:
        ConfigError: If something cannot be saved, ranks' parameters differ, or they do not call it alike; on all ranks.
        BackendError: If a file system does not take the files, on whichever rank; on all ranks.
        PeerLostError: If a rank did not come; names it.
    """
    if Path(folder).suffix in _FILES and not Path(folder).is_dir():
        raise ConfigError(
            f"px.save writes a folder of checkpoints, model and optimizer together, found the name of a file: "
            f"{str(folder)!r}. Give px.save and px.load {str(Path(folder).with_suffix(''))!r}, or write weights alone "
            f"with px.export_state_dict(model, {str(Path(folder).with_suffix('.pdparams'))!r})."
        )
    training = Training(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, ema=ema)
    return save_training(folder, training, step=step, extra=extra, background=background, keep=keep)


def save_training(
    folder: str | Path,
    training: Training,
    *,
    step: int | None,
    extra: Mapping[str, Any] | None,
    background: bool,
    keep: int | None,
) -> Path:
    """Do what `save` does, of objects that were checked. Collective."""
    step, keep = whole_number("step", step, least=0), whole_number("keep", keep, least=1)
    background_saves.wait()
    started = time.perf_counter()
    terms = {"folder": str(folder), "step": step, "background": background, "keep": keep}
    ranks = Ranks.meet("px.save", terms)
    make_consistent(training.model, "px.save", training.optimizer)
    if training.ema is None:
        training = replace(training, ema=kept_average(inner(training.model)))
    begun = _begin(ranks, Path(folder), step, training, extra)
    save_tables(ranks, begun.path / f"tables-{begun.name}", training.model)
    writing = Writing(ranks, begun, keep, training, started)
    if background:
        writing.copy()
        background_saves.start(writing.run)
        logger.info("checkpoint %s: copied in %.3f s, writing it now", begun.path, time.perf_counter() - started)
    else:
        writing.run()
    return begun.path


def whole_number(name: str, value: Any, *, least: int) -> int | None:
    """Return a count as a Python number, of whatever kind it is; None stays None.

    Raises:
        ConfigError: If it is no whole number, or less than allowed.
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
class Begun:
    """A save that all ranks agreed on."""

    parent: Path
    path: Path
    name: str
    step: int
    sequence: int
    layout: dict[str, Entry]
    captured: Captured


class _Known:
    """What the ranks held at the save before: it seldom changes, so it is seldom told again."""

    def __init__(self) -> None:
        self.digest = ""
        self.by_rank: list[dict[str, Part]] = []
        self.layout: dict[str, Entry] = {}


_known = _Known()


def _begin(ranks: Ranks, parent: Path, step: int | None, training: Training, extra: Mapping[str, Any] | None) -> Begun:
    captured: list[Captured] = []
    digest = ""

    def say() -> list[Any]:
        nonlocal digest
        captured.append(capture(training, extra))
        described = {name: held.part.to_json() for name, held in captured[0].held.items()}
        digest = hashlib.sha256(json.dumps([ranks.world_size, described]).encode()).hexdigest()
        return [None if digest == _known.digest else described]

    def decide(said: list[Any]) -> dict[str, Any]:
        is_new = any(answer[0] is not None for answer in said)
        if is_new:
            if len(_known.by_rank) != len(said):
                _known.by_rank = [{} for _ in said]
            for rank, (described,) in enumerate(said):
                if described is not None:
                    _known.by_rank[rank] = {name: Part.from_json(part) for name, part in described.items()}
        layout = deal_out(_known.by_rank) if is_new else None
        made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        for folder in made:
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
        decision = ranks.decide("begin", say, decide)
    except BaseException:
        _known.digest, _known.by_rank = "", []
        raise
    if decision["layout"] is not None:
        _known.layout = {name: Entry.from_json(entry) for name, entry in decision["layout"].items()}
    _known.digest = digest
    return Begun(
        parent,
        step_folder(parent, decision["step"]),
        decision["save"],
        decision["step"],
        decision["sequence"],
        _known.layout,
        captured[0],
    )


class Writing:
    """The part of a save that may run in a thread: write this rank's file, report, and mark the whole complete."""

    def __init__(self, ranks: Ranks, begun: Begun, keep: int | None, training: Training, started: float) -> None:
        self._ranks, self._begun, self._keep, self._started = ranks, begun, keep, started
        self._words = training.words
        self._path = begun.path / f"rank-{ranks.rank}-{begun.name}.safetensors"
        pieces = list(_pieces_of(ranks.rank, begun))
        self._boxes = [(name, box) for name, box, _ in pieces]
        self._tensors = {_key(name, box, begun.layout[name]): tensor for name, box, tensor in pieces}

    def copy(self) -> None:
        """Copy what is to be written, so that training may change it."""
        self._tensors = staged(self._tensors)

    def run(self) -> None:
        """Write, report, and wait until rank 0 has marked the checkpoint complete.

        Collective.
        """
        try:
            self._ranks.decide("written", self._write, self._commit, timeout_s=WRITE_TIMEOUT_S)
        except PeerLostError:
            raise  # whether it is complete is not known here; the next save sweeps up if it is not
        except Exception:
            if self._ranks.rank == 0:
                with contextlib.suppress(OSError):  # the next save sweeps again; why this one failed matters more
                    sweep(self._begun.parent)
            raise
        if self._ranks.rank == 0:
            size = sum(tensor.nbytes for tensor in self._tensors.values())
            seconds = time.perf_counter() - self._started
            logger.info("checkpoint %s: complete in %.2f s; rank 0 wrote %d bytes", self._begun.path, seconds, size)

    def _write(self) -> dict[str, Any]:
        ready = {
            key: tensor.to("cpu").resolve_conj().resolve_neg().contiguous() for key, tensor in self._tensors.items()
        }
        written, begins = write_tensors(self._path, ready)
        pieces = [[name, box.offset, box.size, begin] for (name, box), begin in zip(self._boxes, begins, strict=True)]
        return {
            "file": asdict(written),
            "pieces": pieces,
            "values": self._begun.captured.values,
        }

    def _commit(self, said: list[Any]) -> None:
        begun = self._begun
        for rank, report in enumerate(said):
            if not (begun.path / report["file"]["name"]).exists():
                raise ConfigError(
                    f"rank {rank} wrote {report['file']['name']} to {begun.path}, where rank 0 does not see it. Name a "
                    "folder that all hosts share."
                )
        pieces: dict[str, list[Any]] = {name: [] for name in begun.layout}
        for rank, report in enumerate(said):
            for name, offset, size, begin in report["pieces"]:
                pieces[name].append([rank, offset, size, begin])
        # As text, in which 1 is not True, and NaN is itself.
        texts = [json.dumps(report["values"]) for report in said]
        unique = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        tables = f"tables-{begun.name}"
        write_manifest(
            begun.path,
            {"save": begun.name, "sequence": begun.sequence, "step": begun.step},
            {
                "world_size": self._ranks.world_size,
                "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "holds": self._words,
                "files": [report["file"] for report in said],
                "tensors": {name: [entry.dtype, entry.shape, pieces[name]] for name, entry in begun.layout.items()},
                "values": {"unique": [*map(json.loads, unique)], "of_rank": [unique[text] for text in texts]},
                "tables": tables if (begun.path / tables).exists() else None,
            },
        )
        clean(begun.path, begun.name)
        if self._keep is not None:
            prune(begun.parent, self._keep)


def _pieces_of(rank: int, begun: Begun) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield what this rank writes: the tensor's name, which part of it, and its memory."""
    for name, held in begun.captured.held.items():
        entry = begun.layout[name]
        for piece in entry.pieces:
            if piece.rank == rank:
                yield name, piece.box, held.tensor[piece.box.within(entry.box_of(held.part))]


def _key(name: str, box: Box, entry: Entry) -> str:
    """Return the name of a piece in its file: the tensor's, with its place when it is not all of it."""
    if box == Box.whole(entry.shape):
        return name
    return f"{name}[{', '.join(f'{at}:{at + n}' for at, n in zip(box.offset, box.size, strict=True))}]"
