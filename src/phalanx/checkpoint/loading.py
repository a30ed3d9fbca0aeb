"""`px.load`: resume from a checkpoint, at any number of ranks and under any Plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from phalanx.checkpoint import background as background_saves
from phalanx.checkpoint.export.optimizer_file import load_optimizer_file
from phalanx.checkpoint.export.weights import load_weights
from phalanx.checkpoint.find_newest import find_newest_complete, no_checkpoint_error
from phalanx.checkpoint.folder.manifest import CheckpointManifest
from phalanx.checkpoint.folder.reader import CheckpointReader
from phalanx.checkpoint.ranks import Ranks, is_elastic
from phalanx.checkpoint.replay import replay_request
from phalanx.checkpoint.state.capture import TrainingState
from phalanx.checkpoint.state.restore import Restorer, agree_on_layout
from phalanx.checkpoint.state.tables import has_tables, load_tables
from phalanx.checkpoint.tensors.local_tensors import ModelView
from phalanx.checkpoint.tensors.names import inner
from phalanx.comm import context
from phalanx.errors import ConfigError
from phalanx.parallel.observe.flight_log import flight_log
from phalanx.parallel.optim.ema import EMA, kept_average

logger = logging.getLogger("phalanx.checkpoint")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `px.load` read."""

    path: Path
    """The checkpoint, or the file."""

    step: int = 0
    """Its step, as passed to `save`."""

    extra: Mapping[str, Any] | None = None
    """The saved `extra`; rank 0's at another number of ranks."""

    is_from_peer: bool = False
    """Whether nothing was read: this rank joined an elastic job that runs, and has the state of a peer."""


def load(
    source: str | Path | Mapping[str, Tensor],
    model: Any,
    optimizer: Any = None,
    loader: Any = None,
    *,
    scheduler: Any = None,
    ema: EMA | None = None,
) -> Loaded:
    """Load a checkpoint into a model, optimizer and loader, in place.

    Collective: every rank calls it, with the model distributed as it is to be trained. The checkpoint may come from any
    number of ranks and any Plan; every rank reads only its shards. With an optimizer, the random generators are
    restored too. Only the objects passed are loaded: a model alone takes the weights.

    Args:
        source: The folder given to `save`, whose newest complete checkpoint is taken; or one checkpoint in it; or a
            safetensors file; or a state dict of any framework. Prefixes of wrappers (`module.`, `_orig_mod.`) are
            removed from names in the latter two, which hold weights only.
        model: Takes parameters and buffers. Or an optimizer alone, which takes the state in a file that
            `px.export_state_dict(optimizer, path)` wrote.
        optimizer: Takes state and options of its groups.
        loader: Its next iteration starts with the batch after the last one trained on.
        scheduler: Takes its state.
        ema: Takes the running average of the weights; beside an optimizer that of `strategy.ema` when omitted.

    Returns:
        Path, step and extra of what was loaded.

    Raises:
        ConfigError: If there is no checkpoint, or it does not fit; lists the names that differ. On all ranks, before
            anything is changed.
        DataError: If no checkpoint in the folder is complete; gives the reason for each.
    """
    if isinstance(model, Optimizer):
        return _load_optimizer(source, model, {"loader": loader, "scheduler": scheduler, "ema": ema})
    loaded = load_newest(
        source, TrainingState(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, ema=ema)
    )
    if loaded is None:
        assert not isinstance(source, Mapping)
        raise no_checkpoint_error(Path(source))
    return loaded


def _load_optimizer(source: str | Path | Mapping[str, Tensor], optimizer: Optimizer, others: dict[str, Any]) -> Loaded:
    """Load a file with the state of one optimizer. Collective."""
    extra = [name for name, value in others.items() if value is not None]
    if extra or isinstance(source, Mapping) or not Path(source).is_file():
        raise ConfigError(
            "px.load takes an optimizer alone from the file that px.export_state_dict(optimizer, path) wrote, found "
            f"{'a dict' if isinstance(source, Mapping) else source}{' and ' + ', '.join(extra) if extra else ''}. "
            "To load a checkpoint pass the model too: px.load(folder, model, optimizer)."
        )
    background_saves.wait()
    load_optimizer_file(Path(source), optimizer)
    return Loaded(Path(source))


def load_newest(source: str | Path | Mapping[str, Tensor], training: TrainingState) -> Loaded | None:
    """Load as `load` does, or return None if the folder has no checkpoint. Collective."""
    background_saves.wait()
    if isinstance(source, Mapping) or Path(source).is_file():
        return _load_weights(source, training)
    if is_elastic() and (peer := _state_of_peer(training)) is not None:
        return Loaded(Path(source), peer, is_from_peer=True)
    folder = Path(source)
    if (request := replay_request()) is not None:
        if request.checkpoint is None:
            return None  # the run had none when it began
        folder = Path(request.checkpoint)
    ranks = Ranks.meet("px.load", {"source": str(source), "into": training.words})
    manifest = find_newest_complete(ranks, folder)
    if manifest is None:
        return None
    reader = CheckpointReader(manifest)
    restorer = Restorer(ranks, _with_kept_average(training, manifest), reader)
    restorer.check()
    restorer.resume_replicas()
    if manifest.tables and has_tables(training.model):
        load_tables(manifest.folder / manifest.tables)
    ranks.decide("loaded", restorer.run, lambda _: None)
    flight_log.note_checkpoint(manifest.folder, is_loaded=True, step=manifest.step)
    if ranks.rank == 0:
        saved = manifest.world_size
        logger.info("loaded %s, step %d of %d ranks, into %d", manifest.folder, manifest.step, saved, ranks.world_size)
    return Loaded(manifest.folder, manifest.step, restorer.extra())


def _load_weights(source: str | Path | Mapping[str, Tensor], training: TrainingState) -> Loaded:
    names = [word for word in training.words if word != "model"]
    if names:
        raise ConfigError(
            f"a file of weights has no state for {', '.join(names)}. Load it into the model alone; a file of an "
            "optimizer's state into that: px.load(path, optimizer)."
        )
    ranks = Ranks.meet("px.load", "weights")
    view = ModelView(training.model)
    layout = agree_on_layout(ranks, dict(view.local_tensors()), lambda _: None)
    load_weights(source, ranks, view, layout)
    return Loaded(Path("state dict" if isinstance(source, Mapping) else source))


def _state_of_peer(training: TrainingState) -> int | None:
    """Let a rank that joins an elastic job take the state of a peer; return the updates done, None for other ranks."""
    recovery = context.current().recovery
    if not (recovery.has_joined or recovery.membership.is_joining):
        return None
    if training.loader is not None:
        training.loader.share_state()
    recovery.join()
    return int(recovery.committed)


def _with_kept_average(training: TrainingState, manifest: CheckpointManifest) -> TrainingState:
    """Return the training objects with the running average that the strategy keeps of the model."""
    average = None if training.optimizer is None else kept_average(inner(training.model))
    if training.ema is not None or average is None:
        return training
    if "ema" not in manifest.values[0]:
        logger.warning("%s has no running average of the weights, which is reset", manifest.folder)
        return training
    return replace(training, ema=average)


def load_for_replay(model: Any, optimizer: Any, loader: Any) -> None:
    """Load the checkpoint with which a replay begins, whether or not the script loads one itself. Collective."""
    request = replay_request()
    if request is not None and request.checkpoint is not None:
        load_newest(request.checkpoint, TrainingState(model=model, optimizer=optimizer, loader=loader))
