"""Rule out pipeline, ZeRO or zero bubble for models that do not support them, with the reason (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from phalanx.auto.capture.graph import CapturedStep
from phalanx.auto.capture.layers import Layers
from phalanx.auto.capture.module_calls import ModuleCall
from phalanx.auto.capture.partition_points import PartitionPoints, find_parameter_outside_units, find_partition_points
from phalanx.auto.cost.parallel_config import ATTENTION, ParallelConfig
from phalanx.auto.search.request import Limit
from phalanx.cluster.spec.cluster import Cluster
from phalanx.errors import PlanError
from phalanx.i18n import tr
from phalanx.strategy import DistributedStrategy

_PLAIN: dict[str, int | str] = {
    "pp": 1,
    "vpp": 1,
    "micro": 1,
    "schedule": "none",
    "zero": 0,
    "ep": 1,
    "cp": 1,
    "attention": "none",
}
"""What a parallel config without stages, sharding, experts dealt to ranks and shared sequences says."""


def find_partition_points_or_reason(
    model: nn.Module, captured: CapturedStep, calls: tuple[ModuleCall, ...]
) -> tuple[PartitionPoints | None, str | None]:
    """Return where a model may be split into stages, or why it cannot be."""
    try:
        points = find_partition_points(model, captured, calls)
    except PlanError as error:
        return None, tr("pipelines, as {why}", why=error)
    return points, None if len(points.starts) > 1 else tr(
        "pipelines, as {why}",
        why=tr("all of it belongs together: it is one unit, or its units share parameters or take turns"),
    )


def find_sharding_obstacles(captured: CapturedStep) -> dict[bool, str]:
    """Return why a model cannot be sharded, by whether it is in stages."""
    flat = next((param.name for param in captured.parameters if not param.shape), None)
    if flat is not None:
        why = tr("sharding, as parameter {name!r} has no dim to cut: give it shape (1,)", name=flat)
        return {False: why, True: why}
    alone = find_parameter_outside_units(captured)
    return (
        {} if alone is None else {True: tr("sharding of stages, as parameter {name!r} is in no unit alone", name=alone)}
    )


def find_zero_bubble_obstacle(layers: Layers, base: DistributedStrategy) -> str | None:
    """Return why the backward passes of stages cannot compute gradients of inputs first, if they cannot.

    Stages run whole where they find that out (`parallel/pipeline/schedule`), which fills nothing.
    """
    if base.graph:
        return tr("zero bubble, as the backward pass of a compiled stage is one piece")
    forward = (op for op in layers.captured.operators if op.phase != "backward" and op.written_bytes)  # no views
    # Each expert uses a part of the same parameters.
    uses = Counter(name for op in forward for name in op.parameters * (1 if op.experts is None else 2))
    shared = next(
        (
            parameter.name
            for parameter in layers.captured.parameters
            if parameter.trainable and uses[parameter.name] > 1
        ),
        None,
    )
    if shared is not None:
        return tr("zero bubble, as parameter {name!r} is used more than once", name=shared)
    placed = zip(layers.calls, layers.partition_points.of if layers.partition_points else (), strict=False)
    trained = [piece for call, piece in placed if any(param.trainable for param in call.parameters)]
    return tr("zero bubble, as the model begins with frozen layers") if trained and trained[0] > 0 else None


def find_expert_obstacle(calls: Iterable[ModuleCall]) -> str | None:
    """Return why no experts can be dealt to ranks; None if some can be."""
    if any(call.experts is not None for call in calls):
        return None
    return tr("experts dealt to ranks, as the model calls no module that style `expert` is for")


def explain_unsearched_limits(
    limits: Iterable[Limit],
    unstaged: str | None,
    unsharded: Mapping[bool, str],
    unsplit: str | None,
    undealt: str | None = None,
    unshared: str | None = None,
) -> str:
    """Return why what limits ask for is not searched, as the end of a sentence; nothing if it is.

    Args:
        limits: Those of the parallel config.
        unstaged: Why there are no stages, if there are none.
        unsharded: As `find_sharding_obstacles` returns it.
        unsplit: As `find_zero_bubble_obstacle` returns it.
        undealt: As `find_expert_obstacle` returns it.
        unshared: Why no ranks share a sequence, if none do.
    """
    beyond = [limit for limit in limits if limit.knob in _PLAIN and not limit.allows(_PLAIN)]
    relevant = [limit for limit in beyond if limit.knob not in ("ep", "cp", "attention")]
    in_stages = any(limit.knob != "zero" for limit in relevant)
    why = [undealt] if any(limit.knob == "ep" for limit in beyond) else []
    why += [unshared] if any(limit.knob in ("cp", "attention") for limit in beyond) else []
    why += [unstaged] if in_stages else []
    if in_stages and all(limit.knob in ("zero", "micro") for limit in relevant):
        why.append(
            tr(
                "micro-batches without stages, which is gradient accumulation: take a smaller global batch, and "
                "strategy.gradient_merge adds up several"
            )
        )
    why += unsharded.values() if any(limit.knob == "zero" for limit in relevant) else ()
    why += [unsplit] if any(limit.value == "zero_bubble" for limit in relevant) else []
    reasons = dict.fromkeys(limit for limit in why if limit is not None)
    return tr(" (not searched: {why})", why="; ".join(reasons)) if reasons else ""


def explain_empty_space(limits: Sequence[str], reason: str) -> str:
    """Return the message that no parallel config satisfies these limits, and what remains."""
    purpose = (
        tr(" keeps to the limits {limits}", limits=", ".join(map(repr, limits)))
        if limits
        else tr(" computes this model")
    )
    return tr(
        "No parallel configuration{asked}{found}. Relax a limit, or use another number of ranks.",
        asked=purpose,
        found=reason,
    )


def list_unsearched_experts(calls: Iterable[ModuleCall], ranks: int) -> Iterator[str]:
    """Yield what of experts was not searched on so many ranks."""
    if ranks > 1 and find_expert_obstacle(calls) is None:
        yield tr("experts dealt to ranks together with sharding or stages, which do not train together")


def explain_unsearched_shares(cluster: Cluster) -> str | None:
    """Return which layouts were planned as if all nodes of a cluster were the weakest; None if they are equal."""
    if cluster.is_uniform:
        return None
    return tr(
        "parts by the speed of the nodes for ranks that hold a model together (tensor parallel, stages, experts dealt "
        "to ranks): such layouts are planned as {weakest}",
        weakest=cluster.weakest(),
    )


def list_unsearched_sequences(searched: Iterable[ParallelConfig], obstacle: str | None) -> Iterator[str]:
    """Yield what of sequences that ranks share was not searched.

    Args:
        searched: The parallel configs that were searched.
        obstacle: Why no ranks share a sequence, or none in one of the ways; None if all were searched.
    """
    ways = {config.attention for config in searched if config.context > 1}
    if ways:
        yield tr("context parallel together with tensor parallel, stages or experts dealt to ranks")
    if obstacle is not None and len(ways) < len(ATTENTION):
        yield f"attention={(set(ATTENTION) - ways).pop()}: {obstacle}" if ways else obstacle


def list_unsearched_pipelines(searched: Iterable[ParallelConfig], unsplit: str | None) -> Iterator[str]:
    """Yield what of stages and micro-batches was not searched.

    Args:
        searched: The parallel configs that were searched.
        unsplit: Why no backward pass of them is in two parts (`find_zero_bubble_obstacle`).
    """
    yield tr(
        "micro-batches without stages, which is gradient accumulation: take a smaller global batch, and "
        "strategy.gradient_merge adds up several"
    )
    in_stages = [config for config in searched if config.stages > 1]
    if any(config.model > 1 for config in in_stages):
        yield tr("modules in parts together with stages, but for those that a limit asks for")
    if in_stages:
        yield unsplit or tr(
            "zero bubble together with sharding, recomputation or parts, or with two stages of each rank in a V"
        )
