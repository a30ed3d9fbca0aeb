"""`px.Checkpointer`: periodic saves and resume for a training loop, called once a step."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from phalanx.checkpoint import background as background_saves
from phalanx.checkpoint.graceful_stop import GracefulStop
from phalanx.checkpoint.loading import Loaded, load_newest
from phalanx.checkpoint.ranks import Ranks, is_elastic
from phalanx.checkpoint.saving import check_count, is_between_replicas, save_training
from phalanx.checkpoint.state.capture import TrainingState
from phalanx.comm.elastic.shared_state import share_with_joiners
from phalanx.parallel.optim.ema import EMA

logger = logging.getLogger("phalanx.checkpoint")


class Checkpointer:
    """Saves every so many steps, resumes from the newest checkpoint, and saves before the job is terminated.

        checkpointer = px.Checkpointer("runs/mnist", model, optimizer, loader, every=500)
        checkpointer.resume()
        for epoch in range(loader.epoch, 10):
            for x, y in loader:
                ...
                checkpointer.step()
        checkpointer.close()

    Once created, it handles SIGTERM (a scheduler that preempts the job, or a launcher that is stopped): the process is
    not killed, all ranks save at the same step boundary and exit with code 0.

    Collective: every rank creates one and calls the same methods at the same steps.

    Args:
        folder: Folder of checkpoints, as `px.save` takes it.
        model: The model.
        optimizer: The optimizer.
        loader: The loader that `px.distribute` returned.
        scheduler: A learning-rate scheduler.
        ema: A running average of the weights; that of `strategy.ema` when omitted.
        every: Steps between two saves; only `save()` and SIGTERM save when omitted.
        keep: How many checkpoints to keep.
        background: Whether the saves of `step()` write while training continues.
    """

    def __init__(
        self,
        folder: str | Path,
        model: Any,
        optimizer: Any = None,
        loader: Any = None,
        *,
        scheduler: Any = None,
        ema: EMA | None = None,
        every: int | None = None,
        keep: int | None = 3,
        background: bool = True,
    ) -> None:
        every, keep = check_count("every", every, least=1), check_count("keep", keep, least=1)
        self._training = TrainingState(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, ema=ema)
        self.folder = Path(folder)
        self.steps = 0
        """Steps done, over all runs of the job."""

        self.extra: dict[str, Any] = {}
        """User values, saved and loaded with the rest."""

        self._every, self._keep, self._background = every, keep, background
        self._saved_at: int | None = None
        ranks = Ranks.meet("px.Checkpointer", {"folder": str(folder), "every": every, "keep": keep})
        self._stop = GracefulStop(ranks.rank, ranks.world_size, ranks.store, f"{ranks.prefix}/stop")
        self._stop.listen()
        if is_elastic():
            share_with_joiners("checkpointer", self)

    def state_dict(self) -> dict[str, Any]:
        """Return what a rank that joins an elastic job takes over."""
        return {"steps": self.steps, "extra": self.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of a peer."""
        self.steps, self.extra = state["steps"], state["extra"]

    def resume(self) -> Loaded | None:
        """Resume from the newest complete checkpoint of the folder; return what was loaded, None if there is none."""
        loaded = load_newest(self.folder, self._training)
        if loaded is not None and not loaded.is_from_peer:
            self.steps = self._saved_at = loaded.step
            self.extra = dict(loaded.extra or {})
        return loaded

    def step(self) -> None:
        """Count an optimizer step; save if one is due, or save and exit with code 0 if the job was asked to end.

        A step that waits for further logical replicas of this rank does not count.

        Raises:
            SystemExit: With code 0, on all ranks after the same step, once any of them got SIGTERM.
        """
        if is_between_replicas():
            return  # the optimizer's step has not updated yet
        self.steps += 1
        if self._stop.is_at(self.steps):
            started = time.perf_counter()
            if self._saved_at != self.steps:
                self.save()
            background_saves.wait()
            logger.info("asked to end: saved at step %d in %.1f s", self.steps, time.perf_counter() - started)
            self.close()
            raise SystemExit(0)
        if self._every is not None and self.steps % self._every == 0:
            self.save(background=self._background)

    def save(self, *, background: bool = False) -> Path:
        """Save now; see `px.save`."""
        path = save_training(
            self.folder,
            self._training,
            step=self.steps,
            extra=self.extra,
            background=background,
            keep=self._keep,
        )
        self._saved_at = self.steps
        return path

    def close(self) -> None:
        """Wait for a background save, and restore the handlers of SIGTERM and SIGHUP."""
        self._stop.close()
        background_saves.wait()
