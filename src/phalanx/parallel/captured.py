"""Whether a model's step was captured, for Plans that are of one step alone: those that place single operators."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from phalanx.plan.value import Plan

Check = Callable[[Plan], str | None]
"""Says why a Plan's operators are not those of a captured step; None if they are."""

_checks: weakref.WeakKeyDictionary[nn.Module, Check] = weakref.WeakKeyDictionary()


def note_capture(model: nn.Module, check: Check) -> None:
    """Note that a step of this model was captured; the last one counts."""
    _checks[model] = check


def check_of(model: nn.Module) -> Check | None:
    """Return what compares Plans with the captured step of a model; None if none was captured."""
    return _checks.get(model)
