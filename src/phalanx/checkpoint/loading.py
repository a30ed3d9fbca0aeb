"""`px.load`: go on from a checkpoint, at any number of ranks and under any Plan."""

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
from phalanx.checkpoint.find import newest_good, none_there
from phalanx.checkpoint.folder.manifest import Manifest
from phalanx.checkpoint.folder.read import Reader
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.state.capture import Training
from phalanx.checkpoint.state.restore import Restoring, agree_on_layout
from phalanx.checkpoint.state.tables import has_tables, load_tables
from phalanx.checkpoint.tensors.local import ModelView
from phalanx.checkpoint.tensors.names import inner
from phalanx.errors import ConfigError
from phalanx.parallel.optim.ema import EMA, kept_average

logger = logging.getLogger("phalanx.checkpoint")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `px.load` read."""

    path: Path
    """The checkpoint, or the file."""

    step: int = 0
    """The number that `save` gave it."""

    extra: Mapping[str, Any] | None = None
    """What was saved as `extra`; rank 0's at another number of ranks."""


def load(
    source: str | Path | Mapping[str, Tensor],
    model: Any,
    optimizer: Any = None,
    loader: Any = None,
    *,
    scheduler: Any = None,
    ema: EMA | None = None,
) -> Loaded:
    """Load a checkpoint into a model and what trains it, in place.

    Collective: every rank calls it, with the model distributed as it is to be trained. The checkpoint may come from any
    number of ranks and any Plan; every rank reads only what it holds. Given an optimizer, the random generators go on
    where they were too. What is not given is not loaded: a model alone takes the weights.

    Args:
        source: The folder given to `save`, of which the newest whole checkpoint is taken; or one checkpoint in it; or a
            safetensors file; or a state dict of any framework. Prefixes of wrappers (`module.`, `_orig_mod.`) are
            taken off the names of the latter two, which hold weights alone.
        model: Takes parameters and buffers. Or an optimizer alone, which takes the state in a file that
            `px.export_state_dict(optimizer, path)` wrote.
        optimizer: Takes state and options of its groups.
        loader: Its next iteration goes on with the batch after the last that was trained on.
        scheduler: Takes its state.
        ema: Takes the running average of the weights; beside an optimizer that of `strategy.ema` when omitted.

    Returns:
        Path, step and extra of what was loaded.

    Raises:
        ConfigError: If there is no checkpoint, or it does not fit; lists the names that differ. On all ranks, before
            anything is changed.
        DataError: If no checkpoint in the folder is whole; says why of each.
    """
    if isinstance(model, Optimizer):
        return _load_optimizer(source, model, {"loader": loader, "scheduler": scheduler, "ema": ema})
    found = load_newest(source, Training(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, ema=ema))
    if found is None:
        assert not isinstance(source, Mapping)
        raise none_there(Path(source))
    return found


def _load_optimizer(source: str | Path | Mapping[str, Tensor], optimizer: Optimizer, others: dict[str, Any]) -> Loaded:
    """Load a file that has the state of one optimizer. Collective."""
    given = [name for name, value in others.items() if value is not None]
    if given or isinstance(source, Mapping) or not Path(source).is_file():
        raise ConfigError(
            "px.load takes an optimizer alone from the file that px.export_state_dict(optimizer, path) wrote, found "
            f"{'a dict' if isinstance(source, Mapping) else source}{' and ' + ', '.join(given) if given else ''}. "
            "Of a checkpoint give the model too: px.load(folder, model, optimizer)."
        )
    background_saves.wait()
    load_optimizer_file(Path(source), optimizer)
    return Loaded(Path(source))


def load_newest(source: str | Path | Mapping[str, Tensor], training: Training) -> Loaded | None:
    """Do what `load` does, or return None where the folder has no checkpoint. Collective."""
    background_saves.wait()
    if isinstance(source, Mapping) or Path(source).is_file():
        given = [word for word in training.words if word != "model"]
        if given:
            raise ConfigError(
                f"a file of weights has no state for {', '.join(given)}. Load it into the model alone; a file of an "
                "optimizer's state into that: px.load(path, optimizer)."
            )
        ranks = Ranks.meet("px.load", "weights")
        view = ModelView(training.model)
        layout = agree_on_layout(ranks, dict(view.held()), lambda _: None)
        load_weights(source, ranks, view, layout)
        return Loaded(Path("state dict" if isinstance(source, Mapping) else source))
    folder = Path(source)
    ranks = Ranks.meet("px.load", {"source": str(source), "into": training.words})
    manifest = newest_good(ranks, folder)
    if manifest is None:
        return None
    reader = Reader(manifest)
    restoring = Restoring(ranks, _with_kept_average(training, manifest), reader)
    restoring.check()
    if manifest.tables and has_tables(training.model):
        load_tables(manifest.folder / manifest.tables)
    ranks.decide("loaded", restoring.run, lambda _: None)
    if ranks.rank == 0:
        saved = manifest.world_size
        logger.info("loaded %s, step %d of %d ranks, into %d", manifest.folder, manifest.step, saved, ranks.world_size)
    return Loaded(manifest.folder, manifest.step, restoring.extra())


def _with_kept_average(training: Training, manifest: Manifest) -> Training:
    """Return the objects that train, with the running average that the strategy keeps of the model."""
    kept = None if training.optimizer is None else kept_average(inner(training.model))
    if training.ema is not None or kept is None:
        return training
    if "ema" not in manifest.values[0]:
        logger.warning("%s has no running average of the weights, which begins anew", manifest.folder)
        return training
    return replace(training, ema=kept)
