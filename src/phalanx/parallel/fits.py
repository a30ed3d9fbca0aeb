"""Whether a Plan fits a model and the ranks that were launched, and says only what this version does."""

from __future__ import annotations

from torch import nn

from phalanx.comm.context import Context
from phalanx.errors import PlanError
from phalanx.parallel.describe import owner_of
from phalanx.parallel.tensor.swap import check_styles
from phalanx.plan.server_rules import DENSE
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import (
    AllReduce,
    Frozen,
    ModuleRule,
    OnRanks,
    ParamRule,
    Plan,
    Push,
    ReduceScatter,
    Schedule,
    Server,
)


def check_fits(plan: Plan, model: nn.Module, shape: ModelShape, context: Context) -> None:
    """Raise unless this version can make this model train on these ranks the way the Plan says.

    Raises:
        PlanError: For the first thing that does not fit; says which.
    """
    if plan.model_digest is not None and plan.model_digest != shape.digest():
        raise PlanError(
            f"this Plan was made for another model (digest {plan.model_digest}, this model's is {shape.digest()}): "
            "parameter names, shapes or dtypes differ. Make a new Plan, or remove model_digest from the file."
        )
    if plan.world_size != context.world_size:
        mesh = " x ".join(f"{axis.name}={axis.size}" for axis in plan.mesh) or "none"
        raise PlanError(
            f"the Plan's mesh ({mesh}) needs {plan.world_size} ranks, but {context.world_size} were launched. "
            f"Launch with -n {plan.world_size}, or change the mesh."
        )
    servers = len(context.role.server_endpoints)
    if plan.servers != servers:
        raise PlanError(
            f"the Plan has {plan.servers} parameter servers, but {servers} were launched. Launch with --server_num "
            f"{plan.servers}, or change `servers` of the Plan."
        )
    beyond = _first_beyond_this_version(plan, shape, model)
    if beyond:
        raise PlanError(
            f"this version cannot apply {beyond}. It applies all-reduced, sharded, frozen, module-held and pushed "
            "parameters."
        )
    check_styles(plan, model)
    for name, module in model.named_modules():
        on_ranks = isinstance(plan.rule_for(f"{name}.weight".lstrip(".")).place, OnRanks)
        if on_ranks and getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise PlanError(
                f"module {name!r} makes sparse gradients, which an all-reduce of buckets cannot carry. Build it with "
                f"sparse=False."
            )


def sharded_update(plan: Plan, shape: ModelShape) -> ReduceScatter | None:
    """Return how a Plan shards a model; None if it shards nothing.

    Raises:
        PlanError: If it shards it in several ways, or some parameters and not others.
    """
    found = {plan.rule_for(param.name).update for param in shape.trainable}
    cut = [update for update in found if isinstance(update, ReduceScatter)]
    if cut and len(found) > 1:
        ways = sorted(f"zero={u.zero}" if isinstance(u, ReduceScatter) else u.kind for u in found)
        raise PlanError(
            f"this Plan keeps the parameters of one model in several ways ({', '.join(ways)}). Shard all of a model in "
            "one way, or none of it."
        )
    return cut[0] if cut else None


def _first_beyond_this_version(plan: Plan, shape: ModelShape, model: nn.Module) -> str | None:
    pushes = set()
    for param in shape.params:
        rule = plan.rule_for(param.name)
        if isinstance(rule.update, Push):
            pushes.add(rule.update)
        if isinstance(rule.place, Server) or param.table:
            beyond = _beyond_tables(rule, param, model)
            if beyond:
                return beyond
            continue
        kept = ("replicate", "shard") if rule.managed == "module" else ("replicate",)
        if not isinstance(rule.place, OnRanks) or any(p.kind not in kept for p in rule.place.layout.values()):
            return f"params[{rule.match}].place = {rule.place.kind}"
        plain = isinstance(rule.update, AllReduce) and rule.update == AllReduce(
            bucket_bytes=rule.update.bucket_bytes, reduce=rule.update.reduce, axes=rule.update.axes
        )
        if not plain and not isinstance(rule.update, (Frozen, ReduceScatter)):
            return f"params[{rule.match}].update = {rule.update.model_dump(exclude_defaults=True)}"
    if len(pushes) > 1:
        return f"several ways to push: {', '.join(sorted(push.mode for push in pushes))}"
    for module in plan.modules:
        known = {"match", "unit", "style", "inputs", "outputs"}
        if module != ModuleRule(**{name: value for name, value in module if name in known}):
            return f"modules[{module.match}]"
    return _beyond_steps(plan)


def _beyond_steps(plan: Plan) -> str | None:
    """Return what of a Plan's step, operators and schedule cannot be applied."""
    step = plan.step
    if plan.world_size > 1 and not step.batch_axes and not plan.modules:
        axes = tuple(axis.name for axis in plan.mesh)
        return f"plan.step.batch_axes = (): every rank would compute the same; name the axes that carry rows of {axes}"
    asked = {
        "ops": bool(plan.ops),
        "schedule": plan.schedule != Schedule(),
        "step.accumulate": step.accumulate != 1,
        "step.sink": step.sink != 1,
        "step.scaler": step.scaler is not None,
        "step.sync_bn": step.sync_bn,
    }
    return next((f"plan.{name}" for name, is_asked in asked.items() if is_asked), None)


def _beyond_tables(rule: ParamRule, param: ParamShape, model: nn.Module) -> str | None:
    """Return what of the rule of a parameter in a table cannot be applied."""
    where = f"params[{rule.match}]"
    if not isinstance(rule.place, Server):
        return f"{where}.place = {rule.place.kind} for {param.name!r}, whose rows live in a table"
    if not isinstance(rule.update, Push):
        return f"{where}.update = {rule.update.kind} for {param.name!r}, which lives in a table"
    if param.table is None and rule.place.table != DENSE and not isinstance(owner_of(param.name, model), nn.Embedding):
        return f"{where}.place.table = {rule.place.table!r} for the dense parameter {param.name!r}; use {DENSE!r}"
    return None
