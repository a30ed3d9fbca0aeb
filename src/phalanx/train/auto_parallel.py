"""`px.auto_parallel`: run the planner, by default for the ranks of this job."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from phalanx.auto.auto_parallel import auto_parallel as search
from phalanx.auto.planner.report.result import PlanResult
from phalanx.train.job_cluster import job_cluster
from phalanx.train.model.planning import require_no_tables

Params = ParamSpec("Params")


def _of_this_job(plan: Callable[Params, PlanResult]) -> Callable[Params, PlanResult]:
    signature = inspect.signature(plan)

    @wraps(plan)
    def wrapper(*args: Params.args, **kwargs: Params.kwargs) -> PlanResult:
        require_no_tables(signature.bind(*args, **kwargs).arguments["model"])
        if kwargs.get("cluster") is None:
            kwargs["cluster"] = job_cluster()
        return plan(*args, **kwargs)

    return wrapper


auto_parallel = _of_this_job(search)
