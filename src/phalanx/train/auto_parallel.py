"""`px.auto_parallel`: the planner, which inside a job plans for the ranks of that job."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from torch import nn

from phalanx.auto.auto_parallel import auto_parallel as search
from phalanx.auto.planned import Planned
from phalanx.cluster.messages import text
from phalanx.errors import PlanError
from phalanx.parallel.describe import is_handle
from phalanx.train.job_cluster import job_cluster

Asked = ParamSpec("Asked")


def _of_this_job(plan: Callable[Asked, Planned]) -> Callable[Asked, Planned]:
    signature = inspect.signature(plan)

    @wraps(plan)
    def planned(*args: Asked.args, **named: Asked.kwargs) -> Planned:
        check_no_tables(signature.bind(*args, **named).arguments["model"])
        if named.get("cluster") is None:
            named["cluster"] = job_cluster()
        return plan(*args, **named)

    return planned


auto_parallel = _of_this_job(search)


def check_no_tables(model: Any) -> None:
    """Raise if a model has tables on parameter servers, which no Plan of the planner says anything of.

    Raises:
        PlanError: Names the first table's parameter.
    """
    params = model.named_parameters() if isinstance(model, nn.Module) else ()
    name = next((name for name, param in params if is_handle(param)), None)
    if name is not None:
        raise PlanError(text("plan with tables", name=name))
