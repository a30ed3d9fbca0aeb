"""`EMACallback`: average the weights during training, evaluate with the average."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from phalanx.errors import ConfigError
from phalanx.parallel.optim.ema import EMA, kept_average
from phalanx.train.callbacks.base import Callback

if TYPE_CHECKING:  # a run has callbacks
    from phalanx.train.callbacks.run import Run


class EMACallback(Callback):
    """Keeps a `px.EMA` of the weights, updated with the parameters; evaluations during training use the averages.

    Checkpoints hold it. After training the model has its own weights: `with callback.ema.swapped(): ...` for the
    averages. Where `strategy.ema` keeps an average already, this one only lets evaluations use it.

    Args:
        decay: As `px.EMA` takes it.
        warmup: Likewise.
    """

    def __init__(self, decay: float = 0.999, *, warmup: bool = True) -> None:
        self._decay, self._warmup = decay, warmup
        self._ema: EMA | None = None
        self._is_ours = True

    @property
    def ema(self) -> EMA:
        """The average; available once training has started."""
        if self._ema is None:
            raise ConfigError("EMACallback has no average before training began. Ask for it afterwards.")
        return self._ema

    def setup(self, run: Run) -> None:
        """Begin the average, at the weights as they are."""
        if run.ema is not None:
            raise ConfigError("callbacks has two EMACallback; checkpoints hold one average. Keep one of them.")
        strategy_ema = kept_average(run.model)
        self._is_ours = strategy_ema is None
        self._ema = run.ema = EMA(run.model, self._decay, warmup=self._warmup) if strategy_ema is None else strategy_ema

    def on_update(self, run: Run) -> None:
        """Move the average."""
        if self._is_ours:
            self.ema.update()

    def evaluating(self, run: Run) -> contextlib.AbstractContextManager[None]:
        """Evaluate with the average."""
        return self.ema.swapped()
