"""`LossScale`: dynamic loss scaling for float16, equal on all ranks (Micikevicius et al., arXiv:1710.03740).

`torch.amp.GradScaler` is not used because it lowers the scale at the first overflow (Fleet's setting counts them),
leaves scaled gradients in `param.grad` until the step, so that clipping them is wrong, and does not ask other ranks.
"""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

import phalanx.comm.context as context_of
from phalanx.comm.collectives import all_reduce
from phalanx.errors import ConfigError
from phalanx.parallel.model_shape import is_handle
from phalanx.parallel.session import StepPhase, leave_out_step, session
from phalanx.parallel.step.hooks import add_action
from phalanx.parallel.step.norms import gradient_of, is_dtensor, whole_norms
from phalanx.plan.value import Scaler

logger = logging.getLogger("phalanx.parallel")


def gradient_scale(param: Tensor) -> float:
    """Return by how much a parameter's gradient is too large now; 1 for nearly all."""
    return float(session.gradient_factors.get(param, 1.0)) if session.gradient_factors else 1.0


def take_scale(param: Tensor) -> float:
    """Return the same, to one who divides the gradient by it now."""
    return float(session.gradient_factors.pop(param, 1.0)) if session.gradient_factors else 1.0


class LossScale:
    """The factor of a job's losses: it falls when gradients overflow, such steps are skipped, and it rises again.

    Args:
        settings: Initial value, and when and by how much it changes.
    """

    def __init__(self, settings: Scaler) -> None:
        self._settings = settings
        self.value = settings.initial
        """The factor now; at least 1."""

        self.skipped = 0
        """Steps that were not taken because a gradient was not finite."""

        self._good = self._bad = 0
        self._losses = 0
        self._losses_at_step: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._staying = WeakTensorKeyDictionary()
        self._applied = self.value
        """The factor of the last loss; `value` may have moved since."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale; call `backward` on that. Parameters get their true gradients."""
        self._losses += 1
        self._applied = self.value
        for param in self._staying:
            session.gradient_factors[param] = self.value
        return loss * self.value

    def bind(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of an optimizer's parameters, and skip its steps when one is not finite.

        Every step is collective over all ranks: one flag says whether any of them found such a gradient. Gradients of
        float16 parameters, which would underflow, and of sharded ones stay scaled until the update; copies of weights
        (`keep_master_weights`) come before this call.

        Args:
            optimizer: Any torch optimizer. `optimizer.scale(loss)` is there afterwards.

        Raises:
            ConfigError: If it trains a table, or parameters of another such optimizer.
        """
        if any(is_handle(param) for param in _params_of(optimizer)):
            raise ConfigError(
                "float16 scales gradients, and the optimizer trains rows of a table (SparseEmbedding), whose gradients "
                "nothing would unscale. Use bfloat16."
            )
        if any(param in session.loss_scaled for param in _params_of(optimizer)):
            raise ConfigError(
                "the gradients of these parameters are unscaled already, for another optimizer. Give float16 training "
                "one optimizer for each parameter."
            )
        params = [param for param in _params_of(optimizer) if param.requires_grad]
        for param in params:
            self._watch(param)
        weakref.finalize(optimizer, _leave, params)
        add_action(optimizer, StepPhase.SKIP_OVERFLOW, self._admit)
        add_action(optimizer, StepPhase.UNSCALE_GRADIENTS, _unscale)
        optimizer.scale = self.scale  # type: ignore[attr-defined]

    def update(self, *, overflowed: bool) -> None:
        """Move the scale after a step that was skipped (`overflowed`) or taken."""
        settings = self._settings
        self._good, self._bad = (0, self._bad + 1) if overflowed else (self._good + 1, 0)
        if not settings.dynamic:
            return
        if self._bad >= settings.backoff_after:
            self.value, self._bad = max(self.value * settings.backoff, 1.0), 0
        elif self._good >= settings.growth_every:
            grown, self._good = self.value * settings.growth, 0
            self.value = grown if math.isfinite(torch.tensor(grown).item()) else self.value

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed job needs to continue with the same scale."""
        return {"value": self.value, "good": self._good, "bad": self._bad, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.value, self._good, self._bad, self.skipped = (state[k] for k in ("value", "good", "bad", "skipped"))

    def _watch(self, param: Tensor) -> None:
        # torch runs no hook of a gradient that it puts together from all ranks' parts itself.
        if param.dtype == torch.float16 or is_dtensor(param):
            self._staying[param] = True
            session.loss_scaled[param] = None
        else:
            session.loss_scaled[param] = param.register_hook(lambda gradient: gradient / self._applied)

    def _admit(self, optimizer: Optimizer) -> bool:
        params = [param for param in _params_of(optimizer) if param.grad is not None]
        if params and self._losses == self._losses_at_step.get(optimizer, 0):
            raise ConfigError(
                "float16 gradients underflow without loss scaling, and the loss of this step was not scaled. Write "
                "optimizer.scale(loss).backward(), or use phalanx.train_step."
            )
        late = [param for param in params if param not in session.loss_scaled]
        if late:
            raise ConfigError(
                f"a parameter of shape {tuple(late[0].shape)} was frozen, or not in the optimizer, when the optimizer "
                "was distributed, so its gradient is still scaled. Set requires_grad and add groups before that."
            )
        self._losses_at_step[optimizer] = self._losses
        overflowed = _overflowed(params)
        self.update(overflowed=overflowed)
        if overflowed:
            self.skipped += 1
            leave_out_step(optimizer, self._applied)
            if context_of.current().rank == 0:
                logger.warning(
                    "step skipped (%d so far): a gradient is not finite; the loss scale is %g now",
                    self.skipped,
                    self.value,
                )
        return not overflowed


def _leave(params: list[Tensor]) -> None:
    """Leave gradients alone that nobody scales any more."""
    for param in params:
        session.gradient_factors.pop(param, None)
        hook = session.loss_scaled.pop(param, None)
        if hook is not None:
            hook.remove()


@torch.no_grad()
def _unscale(optimizer: Optimizer) -> None:
    for param in _params_of(optimizer):
        factor = take_scale(param)
        if factor != 1.0 and param.grad is not None:
            param.grad.div_(factor)


@torch.no_grad()
def _overflowed(params: list[Tensor]) -> bool:
    """Return whether any rank has a gradient that is not finite. Collective over all ranks."""
    gradients = [gradient for param in params if (gradient := gradient_of(param)) is not None]
    is_overflow = False
    if gradients:
        largest = whole_norms([gradient for gradient, _ in gradients], [()] * len(gradients), math.inf)
        is_overflow = not bool(largest.isfinite().all())
    flag = torch.tensor(float(is_overflow), device=context_of.current().device)
    return bool(all_reduce(flag, "max"))


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
