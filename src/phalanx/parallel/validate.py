"""`check_fits`: check that a Plan fits a model, the launched ranks and this version."""

from __future__ import annotations

from torch import nn

from phalanx.comm.context import Context
from phalanx.errors import PlanError, did_you_mean
from phalanx.parallel.model_shape import owner_of
from phalanx.parallel.tensor.styles import check_styles
from phalanx.plan.mesh import Position, reduced_along, rows_brought_along
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.rules.servers import DENSE
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.sites import axis_of, regions
from phalanx.plan.value import (
    Average,
    OnRanks,
    ParamRule,
    Plan,
    Push,
    ReduceScatter,
    Server,
    TopK,
    Update,
    matches,
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
            f"the Plan has {plan.servers} parameter servers, but {servers} were launched. Launch with --server-num "
            f"{plan.servers}, or change `servers` of the Plan."
        )
    beyond = _first_beyond_this_version(plan, shape, model)
    if beyond:
        raise PlanError(f"this version cannot apply {beyond}.")
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
        PlanError: If it updates its parameters in ways that do not go together.
    """
    updates = {_alike(plan.rule_for(param.name).update) for param in shape.trainable}
    alone = [update for update in updates if isinstance(update, (ReduceScatter, Average, TopK))]
    if alone and len(updates) > 1:
        ways = sorted(f"zero={u.zero}" if isinstance(u, ReduceScatter) else u.kind for u in updates)
        raise PlanError(
            f"this Plan updates the parameters of one model in several ways ({', '.join(ways)}). Sharding, local steps "
            "and compressed gradients are for all of a model, or none of it."
        )
    return next((update for update in alone if isinstance(update, ReduceScatter)), None)


def _alike(update: Update) -> Update:
    """Return how a parameter is updated; gradients whose terms are added up along further axes, too."""
    return update.model_copy(update={"axes": None}) if isinstance(update, (ReduceScatter, TopK)) else update


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
        beyond = _beyond_ranks(plan, rule)
        if beyond:
            return beyond
    if len(pushes) > 1:
        return f"several ways to push: {', '.join(sorted(push.mode for push in pushes))}"
    for module in plan.modules:
        if module.dtype not in (None, "float32") and module.match:
            return (
                f"modules[{module.match}].dtype = {module.dtype}: a whole model computes in it, or modules in float32"
            )
    return _beyond_steps(plan) or _beyond_operators(plan, model) or _beyond_stages(plan, shape, model)


def _beyond_steps(plan: Plan) -> str | None:
    """Return what of a Plan's step cannot be applied."""
    step = plan.step
    if plan.world_size > 1 and not step.batch_axes and not plan.modules and not plan.ops:
        axes = tuple(axis.name for axis in plan.mesh)
        return f"plan.step.batch_axes = (): every rank would compute the same; name the axes that carry rows of {axes}"
    return None


def _beyond_operators(plan: Plan, model: nn.Module) -> str | None:
    """Return what of a Plan's rules for operators cannot be applied, whatever step the model runs."""
    names = {name for name, _ in model.named_modules()}
    styled = [name for name in names if any(rule.style and matches(rule.match, name) for rule in plan.modules)]
    axis = axis_of(plan)
    for path in regions(plan):
        if path not in names:
            return f"ops in {path!r}: the model has no such module.{did_you_mean(path, names)}"
        cut = min((name for name in styled if not path or f"{name}.".startswith(f"{path}.")), default=None)
        if cut is not None:
            return f"ops in {path!r}, in which {cut!r} is cut over ranks by itself: place operators beside it"
    beside = {
        f"along {axis!r}, which the mesh has not": axis is not None and axis not in {a.name for a in plan.mesh},
        "together with step.compiled": plan.step.compiled,
        "of a module that holds several units of a pipeline": _holds_units(plan),
    }
    combination = next((name for name, is_there in beside.items() if plan.ops and is_there), None)
    return None if combination is None else f"plan.ops {combination}"


def _holds_units(plan: Plan) -> bool:
    """Return whether operators are placed in a module that stages may cut apart."""
    if Position(plan.mesh, rank=0).count((STAGE_AXIS,)) == 1:
        return False
    placed = [rule.match for rule in plan.modules if rule.stage is not None]
    return any(not path or unit.startswith(f"{path}.") for path in regions(plan) for unit in placed)


def _beyond_stages(plan: Plan, shape: ModelShape, model: nn.Module) -> str | None:
    """Return what of a Plan's stages and schedule cannot be applied."""
    schedule, ranks = plan.schedule, Position(plan.mesh, rank=0).count((STAGE_AXIS,))
    if ranks == 1:
        return None
    stages = {rule.match: rule.stage for rule in plan.modules if rule.stage is not None}
    names = {name for name, _ in model.named_modules()}
    unknown = next((name for name in stages if name not in names), None)
    if unknown is not None:
        return f"modules[{unknown}].stage: the model has no such module.{did_you_mean(unknown, names)}"
    if set(stages.values()) != set(range(ranks * schedule.virtual)) or schedule.kind == "none":
        return (
            f"stages {sorted(set(stages.values()))} by the schedule {schedule.kind!r}: {ranks} ranks with "
            f"{schedule.virtual} each need stages 0 to {ranks * schedule.virtual - 1}, and a schedule"
        )
    if (schedule.virtual > 1) != (schedule.kind == "interleaved") and schedule.kind != "zero_bubble":
        return f"the schedule {schedule.kind!r} with virtual={schedule.virtual} stages of each rank"
    rules = [plan.rule_for(param.name) for param in shape.trainable]
    # Such layers exchange rows within a micro-batch, of which these ranks may have different numbers.
    copies = Position(plan.mesh, rank=0).count(plan.step.batch_axes)
    cut_by_rows = copies > 1 and any(
        rule.managed == "module" and (not reduced_along(plan, rule) or rows_brought_along(plan, rule)) for rule in rules
    )
    beside = {
        # A graph's backward pass is one piece.
        "step.compiled, by the schedule zero_bubble,": schedule.kind == "zero_bubble" and plan.step.compiled,
        # Its backward pass has two parts, each of which would compute again.
        "modules.recompute, by the schedule zero_bubble,": schedule.kind == "zero_bubble"
        and any(rule.recompute != "none" for rule in plan.modules),
        "step.batch_axes with the stages among them": STAGE_AXIS in plan.step.batch_axes,
        "params.update average or push": any(isinstance(rule.update, (Average, Push)) for rule in rules),
        "sharding, by the schedule zero_bubble or with step.accumulate,": (
            schedule.kind == "zero_bubble" or plan.step.accumulate > 1
        )
        and any(isinstance(rule.update, ReduceScatter) for rule in rules),
        "layers cut over ranks that read other rows": cut_by_rows,
    }
    combination = next((name for name, is_there in beside.items() if is_there), None)
    return None if combination is None else f"{combination} together with stages of a pipeline"


def _beyond_ranks(plan: Plan, rule: ParamRule) -> str | None:
    """Return what of the rule of a parameter that lives on the ranks cannot be applied."""
    kinds, update = ("replicate", "shard") if rule.managed == "module" else ("replicate",), rule.update
    if not isinstance(rule.place, OnRanks) or any(p.kind not in kinds for p in rule.place.layout.values()):
        return f"params[{rule.match}].place = {rule.place.kind}"
    if isinstance(update, ReduceScatter) and update.axes and not set(update.axes) >= set(plan.step.batch_axes):
        return f"params[{rule.match}].update.axes = {update.axes}: slices are added up along all of step.batch_axes"
    copies = Position(plan.mesh, rank=0).count(plan.step.batch_axes)
    if (
        isinstance(update, (Average, TopK))
        and rule.managed == "module"
        and copies > 1
        and not reduced_along(plan, rule)
    ):
        return (
            f"params[{rule.match}].update = {update.kind} for parts to which the gradients of all rows come; a layer "
            'that is cut trains that way along axis="model"'
        )
    return None


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
