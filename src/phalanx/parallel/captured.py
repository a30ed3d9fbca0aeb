"""Whether a model's step was captured, for Plans that are of one step alone: those that place single operators."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from phalanx.comm.agreement import share
from phalanx.errors import PlanError
from phalanx.plan.value import Plan

Check = Callable[[Plan], str | None]
"""Says why a Plan's operators are not those of a captured step; None if they are."""

_checks: weakref.WeakKeyDictionary[nn.Module, Check] = weakref.WeakKeyDictionary()


def note_capture(model: nn.Module, check: Check) -> None:
    """Note that a step of this model was captured; the last one counts."""
    _checks[model] = check


def check_operators(plan: Plan, model: nn.Module) -> None:
    """Raise unless a Plan's rules for operators are of the step that this model runs. Collective if there are any.

    The step is the one that rank 0 captured of this model (`phalanx.auto.capture.capture`, `px.auto_parallel`).

    Raises:
        PlanError: On all ranks; says what does not fit.
    """
    if not plan.ops:
        return
    check, why = _checks.get(model), None
    if check is not None:
        why = check(plan)
    elif dist.get_rank() == 0 if dist.is_initialized() else True:
        why = (
            f"they are of the step captured as {plan.capture_digest}, and no step of this model was captured. Call "
            "phalanx.auto.capture.capture(model, sample, loss_fn) with a global batch before, on rank 0 at least"
        )
    why = share("operators", why)
    if why is not None:
        raise PlanError(f"this Plan places single operators: {why}, or remove `ops`.")
