"""`px.auto_parallel`: the planner, which inside a job plans for the ranks of that job."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from phalanx.auto.auto_parallel import auto_parallel as search
from phalanx.auto.planner.result import Planned
from phalanx.train.job_cluster import job_cluster
from phalanx.train.model.no_tables import check_no_tables

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
