"""`cut_stages`: split a model into pipeline stages, balanced by parameter bytes."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import PlanError, did_you_mean
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import Plan


def units(shape: ModelShape) -> list[str]:
    """Return the names of the modules that a model is a chain of, as far as parameter names tell, in order.

    A unit is a direct child that has parameters; an element of a list or sequence (`layers.0`) is one of its own.
    """
    names = (param.name.split(".")[:-1] for param in shape.params)
    return list(dict.fromkeys(_unit(parts) for parts in names if parts))


def cut_stages(shape: ModelShape, count: int, cuts: Sequence[str] = ()) -> dict[str, int]:
    """Return the stage of every unit.

    Args:
        shape: The model's parameters.
        count: Number of stages.
        cuts: Units at which stages 1, 2, ... begin; where they make the largest stage as small as it can be when empty.

    Raises:
        PlanError: If there are fewer units than stages, or the cuts are not units in order.
    """
    names = units(shape)
    if len(names) < count:
        raise PlanError(
            f"{count} stages were asked for, and this model is a chain of {len(names)} modules with parameters "
            f"({', '.join(names)}). Ask for at most {len(names)}."
        )
    starts = _cut_starts(names, count, cuts) if cuts else _balanced([_weight(shape, name) for name in names], count)
    stage, stages = 0, {}
    for index, name in enumerate(names):
        stage += index in starts[1:]
        stages[name] = stage
    return stages


def stage_of(plan: Plan, name: str) -> int | None:
    """Return the stage of what has this name, of the unit that holds it; None outside all units."""
    stages = {rule.match: rule.stage for rule in plan.modules if rule.stage is not None}
    while name and stages.get(name) is None:
        name = name.rpartition(".")[0]
    return stages.get(name) if name else None


def shares_of(plan: Plan, shape: ModelShape) -> list[ModelShape]:
    """Return what each rank along the stage axis holds of a model; all of it in a Plan without that axis.

    Parameters outside all units, whose stage only the forward pass tells, count as the first's.
    """
    ranks = next((axis.size for axis in plan.mesh if axis.name == STAGE_AXIS), 1)
    params_by_rank: list[list[ParamShape]] = [[] for _ in range(ranks)]
    for param in shape.params:
        params_by_rank[plan.schedule.holder(stage_of(plan, param.name) or 0, ranks)].append(param)
    return [ModelShape(tuple(params)) for params in params_by_rank] if ranks > 1 else [shape]


def _unit(parts: Sequence[str]) -> str:
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: numbered + 1])


def _weight(shape: ModelShape, unit: str) -> int:
    return sum(param.bytes for param in shape.params if param.name.startswith(f"{unit}."))


def _cut_starts(names: Sequence[str], count: int, cuts: Sequence[str]) -> list[int]:
    unknown = next((name for name in cuts if name not in names), None)
    if unknown is not None:
        raise PlanError(
            f"pipeline_configs cuts at {unknown!r}, which is not a unit of this model.{did_you_mean(unknown, names)} "
            f"Its units are: {', '.join(names)}."
        )
    starts = [0, *(names.index(name) for name in cuts)]
    if len(starts) != count or sorted(set(starts)) != starts:
        raise PlanError(
            f"{count} stages need {count - 1} cuts in the order of the model, after its first unit; found {list(cuts)}."
        )
    return starts


def _balanced(weights: Sequence[int], count: int) -> list[int]:
    """Return where runs begin that make the heaviest run as light as it can be, each run with one unit at least."""
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    # best[k][n]: (weight of the heaviest run, start of the last) of the first n units in k runs.
    best: list[dict[int, tuple[int, int]]] = [{}, {n: (total[n], 0) for n in range(1, len(weights) + 1)}]
    for runs in range(2, count + 1):
        best.append(
            {
                n: min((max(best[runs - 1][s][0], total[n] - total[s]), s) for s in range(runs - 1, n))
                for n in range(runs, len(weights) + 1)
            }
        )
    starts, end = [], len(weights)
    for runs in range(count, 0, -1):
        end = best[runs][end][1]
        starts.append(end)
    return starts[::-1]
