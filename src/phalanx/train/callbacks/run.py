"""`Run`: the state of a training run (epoch, step, loss), with callbacks, resume and stop.

    run = Run(model=model, optimizer=optimizer, loader=loader, epochs=10, callbacks=callbacks)
    run.resume(folder)                                    # or not
    with run:                                             # on_train_begin; on_train_end, and close in any case
        while run.begin_epoch():                          # False after the last epoch, or once training was stopped
            for x, y in loader:
                has_updated = run.batch_done(step(x, y).loss)   # on_update
                if has_updated and run.end_step():        # on_step_end; True when training stops here
                    break
            else:
                with run.evaluating():
                    metrics = px.evaluate(...)
                run.end_evaluation(metrics)               # on_eval_end
                run.end_epoch()                           # on_epoch_end

In a sink of k steps, `batch_done` comes after each and `end_step` after the last. A batch that updates nothing
(`batch_done` returned False, under gradient_merge) ends no step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from phalanx.checkpoint.loading import Loaded, load_newest
from phalanx.checkpoint.replay import replay_request
from phalanx.checkpoint.state.capture import TrainingState
from phalanx.comm import context
from phalanx.comm.context import BatchShare
from phalanx.comm.elastic.shared_state import end_sharing, share_with_joiners
from phalanx.errors import ConfigError, PeerLostError
from phalanx.parallel.optim.ema import EMA
from phalanx.parallel.session import accumulation_of
from phalanx.parallel.step.gate import has_updated
from phalanx.train import events
from phalanx.train.callbacks.base import Callback, read_callbacks
from phalanx.train.callbacks.dispatch import SIGNALLED, CallbackDispatcher
from phalanx.train.callbacks.measure import EpochClock, RoundLoss, Throughput, batches_per_step, memory
from phalanx.train.metrics.base import mean_over_ranks

logger = logging.getLogger("phalanx.train")


class Run:
    """Where training is, for callbacks; and what tells them.

    Collective: every rank makes one with the same callbacks and calls the same methods at the same places.

    Args:
        model: The model that trains.
        optimizer: Its optimizer.
        loader: The `ShardedLoader` that training iterates over.
        epochs: Passes over the data.
        callbacks: Act in this order, those that act last after the others.
        steps_in_sink: Steps of a sink; 1 without sinks.
        evaluated: The metrics that an evaluation will give; None when that is not known before.
    """

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any,
        loader: Any,
        epochs: int,
        callbacks: Callback | Iterable[Callback] | None = None,
        steps_in_sink: int = 1,
        evaluated: Collection[str] | None = None,
    ) -> None:
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.epochs = epochs
        """Passes over the data to make."""

        self.epoch = 0
        """Pass in progress, counted from 0."""

        self.step = 0
        """Updates of the parameters so far, over all epochs."""

        self.batches = 0
        """Batches of this pass so far."""

        self.samples = 0
        """Rows trained on so far, over all ranks."""

        self.steps_in_sink = steps_in_sink
        self.loss: Tensor | None = None
        """This rank's mean loss of the current batch, detached; None before the first."""

        self.evaluated = evaluated
        """The metrics an evaluation will give, for callbacks that follow one; None when that is not known."""

        self.metrics: Mapping[str, float] = {}
        """Result of the last evaluation."""

        self.train_s = 0.0
        """Seconds of steps, without those in which something was compiled; written by whoever makes the steps."""

        self.compile_s = 0.0
        """Seconds of steps in which something was compiled, likewise."""

        self.clock = EpochClock()
        """Time spent in epochs."""

        self.resumed_from: Loaded | None = None
        self.ema: EMA | None = None
        """The average of the weights that a callback keeps, for checkpoints."""

        self.callbacks = read_callbacks(callbacks)
        _check_sinks(self.callbacks, steps_in_sink)
        current = context.init()
        self.steps_per_epoch = _length(loader)
        """Batches of one epoch; None when the data has no length."""

        self._first_epoch = loader.epoch
        self._share: BatchShare | None = None
        self._round = RoundLoss()
        self._global_loss: tuple[int, float] | None = None
        self._speed = Throughput()
        self._device = current.device
        self._recovery = current.recovery
        if self._recovery is not None:
            loader.share_state()
            share_with_joiners("run", self)
        self._dispatcher = CallbackDispatcher(self.callbacks, {"epochs": epochs, "sink": steps_in_sink})
        try:
            self._dispatcher.call_all("setup", self)
            self._dispatcher.decide("setup")
        except BaseException:
            self._dispatcher.close()
            raise

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items() if isinstance(value, float))
        parts = [f"epoch {self.epoch} of {self.epochs}", f"{self.step} steps", metrics, self.stop_reason or ""]
        return f"Run({', '.join(filter(None, parts))})"

    @property
    def rank(self) -> int:
        """This rank, 0 to `world_size` - 1; another one once ranks of an elastic job have left."""
        return context.current().rank

    @property
    def world_size(self) -> int:
        """Number of ranks now."""
        return context.current().world_size

    # -- for callbacks ---------------------------------------------------------------------------------------------

    def global_loss(self) -> float:
        """Return the mean loss over the samples of all ranks. Collective; a host round trip, once a step at most."""
        if self.loss is None:
            raise ConfigError("run.global_loss() was called before the first step. Call it in on_step_end or later.")
        if self._global_loss is None or self._global_loss[0] != self.samples:
            self._global_loss = self.samples, self._mean_over_ranks(self.loss)
        return self._global_loss[1]

    def _mean_over_ranks(self, loss: Tensor) -> float:
        try:
            return float(mean_over_ranks(loss, self._share))
        except PeerLostError:
            if self._recovery is None:
                raise
            return float(loss)  # the next global batch continues without the lost rank

    def stop(self, reason: str) -> None:
        """Stop training on all ranks.

        Not collective. Called by all ranks at one place, they stop at the edge (of a step, sink or epoch) that follows;
        called by some, at an edge soon after on which all agree. Ranks of an elastic job agree with the next update,
        and stop after it.
        """
        self._dispatcher.request_stop(reason)

    def stop_on_signal(self) -> None:
        """Take SIGTERM of any rank as a request to stop on all; until the run is closed."""
        self._dispatcher.listen()

    @property
    def stop_reason(self) -> str | None:
        """Why training was stopped before its end, the same on every rank; None when it was not."""
        return self._dispatcher.stop_reason

    @property
    def was_signalled(self) -> bool:
        """Whether a signal stopped training, on whichever rank."""
        return self.stop_reason == SIGNALLED

    @property
    def total_steps(self) -> int | None:
        """Updates of all epochs, without steps that float16 skips; None when the data has no length."""
        if self.steps_per_epoch is None:
            return None
        merge = accumulation_of(self.optimizer)
        batches = self.epochs * self.steps_per_epoch // batches_per_step()
        return batches if merge is None else batches // merge.steps

    @property
    def training(self) -> TrainingState:
        """What a checkpoint of this run holds."""
        return TrainingState(model=self.model, optimizer=self.optimizer, loader=self.loader, ema=self.ema)

    def state_dict(self) -> dict[str, Any]:
        """Return where the run is and the states of its callbacks; checkpoints hold it as `extra["run"]`."""
        states = {name: callback.state_dict() for name, callback in self._list_named()}
        return {
            "step": self.step,
            "samples": self.samples,
            "first_epoch": self._first_epoch,
            "callbacks": {name: state for name, state in states.items() if state},
        }

    # -- for whoever trains ----------------------------------------------------------------------------------------

    def resume(self, folder: str | Path) -> Loaded | None:
        """Resume from the newest complete checkpoint of a folder; return what was loaded, None where there is none.

        Collective. The loader resumes inside its epoch; `begin_epoch` continues the pass it was in.
        """
        if self._is_joining:
            return None  # it takes the state of a peer, at its first epoch
        self.resumed_from = loaded = load_newest(folder, self.training)
        if loaded is not None:
            state = (loaded.extra or {}).get("run")
            if state is None:
                raise ConfigError(
                    f"{loaded.path} was not saved by a callback, so where its run was is not known. Load it with "
                    "phalanx.load before training."
                )
            self.steps_per_epoch = _length(self.loader)  # the checkpoint may have brought its number of replicas
            self._take_over(state)
        return loaded

    @property
    def _is_joining(self) -> bool:
        return self._recovery is not None and self._recovery.membership.is_joining

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a peer of an elastic job is."""
        self._take_over(state)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        self.step, self.samples, self._first_epoch = state["step"], state["samples"], state["first_epoch"]
        self.epoch = self.loader.epoch - self._first_epoch
        if self.epoch >= self.epochs and self.rank == 0:
            logger.warning(
                "the checkpoint has made %d passes of the %d asked for: nothing is left to train. A resumed run counts "
                "passes from the first start",
                self.epoch,
                self.epochs,
            )
        for name, callback in self._list_named():
            if name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][name])
            elif callback.state_dict():
                logger.warning("callback %s starts fresh: the checkpoint has no state of it", name)

    def _list_named(self) -> Iterator[tuple[str, Callback]]:
        return zip(self._dispatcher.names, self.callbacks, strict=True)

    def __enter__(self) -> Run:
        """Begin: `on_train_begin`."""
        request = replay_request()
        if request is not None and request.checkpoint is not None and self.resumed_from is None:
            self.resume(request.checkpoint)
        self._speed.restart(self)
        events.run_reports(self._facts)
        self._dispatcher.call_all("on_train_begin", self)
        return self

    def begin_epoch(self) -> bool:
        """Begin the next epoch; return False, and begin none, after the last or once training was stopped."""
        if self._is_joining:
            self._recovery.join()
        if self._dispatcher.should_stop(self.step) or self.epoch >= self.epochs:
            return False
        steps = self.loader.state_dict()["position"] // self.loader.global_batch
        self.batches = steps * batches_per_step()
        self._dispatcher.call_all("on_epoch_begin", self)
        self.clock.begin()
        return True

    def batch_done(self, loss: Tensor, share: BatchShare | None = None) -> bool:
        """Count a batch; return whether the parameters were updated (not by every batch under gradient_merge).

        Args:
            loss: This rank's mean loss, detached.
            share: The samples of this batch; those of the batch the loader yielded last when omitted.
        """
        self.clock.tick()
        self.loss, self._share = self._round.add(loss, share or context.current().batch)
        self.batches += 1
        updated = has_updated(self.optimizer)
        if self._round.is_complete:
            self.samples += self._share.global_rows if self._share is not None else 0
        if updated:
            self.step += 1
            self._dispatcher.call_all("on_update", self)
        return updated

    def end_step(self) -> bool:
        """End a step or sink: `on_step_end`; return whether training stops here."""
        if self.loss is not None:
            events.report_run(self.step - 1, self.loss)
        self._dispatcher.call_all("on_step_end", self)
        return self._dispatcher.should_stop(self.step)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let callbacks prepare the model for an evaluation inside the block."""
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback.evaluating(self))
            yield

    def end_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Tell callbacks the result of an evaluation: `on_eval_end`."""
        self.metrics = metrics
        self._dispatcher.call_all("on_eval_end", self)

    def end_epoch(self) -> None:
        """End an epoch: `on_epoch_end`."""
        self._dispatcher.call_all("on_epoch_end", self)
        self.epoch += 1

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        """End: `on_train_end` unless there was an error, and `close` in any case.

        Raises:
            SystemExit: With code 0, when a signal stopped training.
        """
        try:
            if kind is None:
                self._dispatcher.call_all("on_train_end", self)
                self._dispatcher.decide("end")
        finally:
            events.run_reports(None)
            end_sharing(self)
            self._dispatcher.close()
            with contextlib.ExitStack() as closing:  # all, also where one fails
                for callback in self.callbacks:
                    closing.callback(callback.close)
        if kind is None and self.was_signalled:
            raise SystemExit(0)

    def _facts(self) -> dict[str, float | int | str]:
        """Return what an event of this run holds beside step and loss; samples/s are those of all ranks."""
        return {
            "epoch": self.epoch,
            "epochs": self.epochs,
            **({} if self.total_steps is None else {"total_steps": self.total_steps}),
            "samples": self.samples,
            "samples_per_s": round(self._speed.rate(self), 1),
            **memory(self._device),
            "train_s": round(self.train_s, 3),
            "compile_s": round(self.compile_s, 3),
        }


def _check_sinks(callbacks: Iterable[Callback], steps_in_sink: int) -> None:
    for callback in callbacks:
        if steps_in_sink > 1 and callback.needs_every_step:
            raise ConfigError(
                f"callback {type(callback).__name__} must act after every step, and sinks of {steps_in_sink} steps "
                "were asked for. Leave it out, or train with dataset_sink_mode=False."
            )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
