"""What no Plan of the planner is for: models with tables on parameter servers."""

from __future__ import annotations

from typing import Any

from torch import nn

from phalanx.cluster.messages.messages import text
from phalanx.errors import PlanError
from phalanx.parallel.model_shape import is_handle


def check_no_tables(model: Any) -> None:
    """Raise if a model has tables on parameter servers, which no Plan of the planner says anything of.

    Raises:
        PlanError: Names the first table's parameter.
    """
    params = model.named_parameters() if isinstance(model, nn.Module) else ()
    name = next((name for name, param in params if is_handle(param)), None)
    if name is not None:
        raise PlanError(text("plan with tables", name=name))
