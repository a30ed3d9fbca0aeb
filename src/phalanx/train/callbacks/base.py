"""`Callback`: base class with the hooks of a training run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from phalanx.errors import ConfigError

if TYPE_CHECKING:  # a run has callbacks
    from phalanx.train.callbacks.run import Run


class Callback:
    """Hooks of a training run; every method does nothing until overridden.

    Every rank has the same callbacks and calls them at the same points, so a method may use collectives if it does so
    on every rank. One that raises on any rank ends the training of all ranks with an error that names it.

    In sink mode `on_step_end` is called once for a sink of several steps; `on_update` still after every step.
    """

    needs_every_step = False
    """Whether `on_step_end` must be called after every step, so that sinks of several steps are refused."""

    needs_evaluation = False
    """Whether it needs evaluations, so that training without `valid_dataset` is refused."""

    acts_last = False
    """Whether it is called after all others, to save or show what they did."""

    def setup(self, run: Run) -> None:
        """Create what needs the model or its optimizer. Called once, before a checkpoint is loaded."""

    def on_train_begin(self, run: Run) -> None:
        """Before the first epoch; a checkpoint is loaded by then (`run.resumed_from`)."""

    def on_epoch_begin(self, run: Run) -> None:
        """Before the first batch of an epoch."""

    def on_update(self, run: Run) -> None:
        """After every update of the parameters, also inside a sink. Must not read values from the device."""

    def on_step_end(self, run: Run) -> None:
        """After every update; in sink mode after the last of a sink."""

    def evaluating(self, run: Run) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model is evaluated."""
        return contextlib.nullcontext()

    def on_eval_end(self, run: Run) -> None:
        """After an evaluation; its result is `run.metrics`. Before `on_epoch_end` of the same epoch."""

    def on_epoch_end(self, run: Run) -> None:
        """After the last batch of an epoch, and its evaluation."""

    def on_train_end(self, run: Run) -> None:
        """After training, also when it was stopped; not after an error."""

    def close(self) -> None:
        """Close files and restore handlers. Called once at the end, also after an error. Must not use collectives."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: numbers, text and tensors, in lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned."""


def read_callbacks(callbacks: Callback | Iterable[Callback] | None) -> list[Callback]:
    """Return the callbacks in the order in which they are called.

    Raises:
        ConfigError: If one is no callback, or is listed twice.
    """
    is_several = isinstance(callbacks, Iterable) and not isinstance(callbacks, Callback | type | str)
    chosen: list[Any] = [] if callbacks is None else list(callbacks) if is_several else [callbacks]  # type: ignore[arg-type]
    for callback in chosen:
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise ConfigError(f"callbacks has the class {callback.__name__}. Make one: {callback.__name__}().")
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks takes phalanx.Callback objects, found {type(callback).__name__}. Derive it from "
                "phalanx.Callback, and override the methods it needs."
            )
    if len(set(map(id, chosen))) < len(chosen):
        raise ConfigError("callbacks has one object twice. Make two, if it is to act twice.")
    return sorted(chosen, key=lambda callback: callback.acts_last)


def check_evaluated(callbacks: Iterable[Callback]) -> None:
    """Raise if a callback needs evaluations; for training without any.

    Raises:
        ConfigError: Names it.
    """
    for callback in callbacks:
        if callback.needs_evaluation:
            raise ConfigError(
                f"callback {type(callback).__name__} follows an evaluation, and training was asked for none. Give "
                "valid_dataset=, or leave it out."
            )


def names_of(callbacks: Iterable[Callback]) -> list[str]:
    """Return a name for each callback: that of its class, numbered from the second of a class."""
    names: list[str] = []
    for callback in callbacks:
        name = type(callback).__name__
        same = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{same + 1}" if same else name)
    return names
