"""What a model's Plans cannot be, and why: stages, sharding, backward passes in two parts (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from phalanx.auto.capture.graph import Captured
from phalanx.auto.capture.layers import Layers
from phalanx.auto.capture.module_calls import Segment
from phalanx.auto.capture.partition_points import Pieces, in_no_unit_alone, pieces_of
from phalanx.auto.cost.parallel_config import Arrangement
from phalanx.auto.search.request import Limit
from phalanx.cluster.messages.messages import text
from phalanx.errors import PlanError
from phalanx.strategy import DistributedStrategy

_PLAIN: dict[str, int | str] = {"pp": 1, "vpp": 1, "micro": 1, "schedule": "none", "zero": 0}
"""What an arrangement without stages and sharding says."""


def pieces_or_why(model: nn.Module, captured: Captured, found: tuple[Segment, ...]) -> tuple[Pieces | None, str | None]:
    """Return where a model may be cut into stages, or why it cannot be."""
    try:
        pieces = pieces_of(model, captured, found)
    except PlanError as error:
        return None, text("left out pipelines", why=error)
    return pieces, None if len(pieces.starts) > 1 else text("left out pipelines", why=text("stages of one piece"))


def why_unsharded(captured: Captured) -> dict[bool, str]:
    """Return why a model cannot be sharded, by whether it is in stages."""
    flat = next((param.name for param in captured.parameters if not param.shape), None)
    if flat is not None:
        why = text("left out sharding", name=flat)
        return {False: why, True: why}
    alone = in_no_unit_alone(captured)
    return {} if alone is None else {True: text("left out sharded stages", name=alone)}


def why_unsplit(layers: Layers, base: DistributedStrategy) -> str | None:
    """Return why the backward passes of stages cannot compute gradients of inputs first, if they cannot.

    Stages run whole where they find that out (`parallel/pipeline/schedule`), which fills nothing.
    """
    if base.graph:
        return text("left out compiled zero bubble")
    forward = (op for op in layers.captured.operators if op.phase != "backward" and op.written_bytes)  # no views
    uses = Counter(name for op in forward for name in op.parameters)
    shared = next((one.name for one in layers.captured.parameters if one.trainable and uses[one.name] > 1), None)
    if shared is not None:
        return text("left out shared zero bubble", name=shared)
    placed = zip(layers.segments, layers.pieces.of if layers.pieces else (), strict=False)
    trained = [piece for segment, piece in placed if any(param.trainable for param in segment.parameters)]
    return text("left out frozen zero bubble") if trained and trained[0] > 0 else None


def left_out_of_limits(
    limits: Iterable[Limit], unstaged: str | None, unsharded: Mapping[bool, str], unsplit: str | None
) -> str:
    """Return why what limits ask for is not searched, as the end of a sentence; nothing if it is.

    Args:
        limits: Those of the arrangement.
        unstaged: Why there are no stages, if there are none.
        unsharded: As `why_unsharded` returns it.
        unsplit: As `why_unsplit` returns it.
    """
    asked = [one for one in limits if one.knob in _PLAIN and not one.allows(_PLAIN)]
    in_stages = any(one.knob != "zero" for one in asked)
    why = [unstaged] if in_stages else []
    if in_stages and all(one.knob in ("zero", "micro") for one in asked):
        why.append(text("left out accumulation"))
    why += unsharded.values() if any(one.knob == "zero" for one in asked) else ()
    why += [unsplit] if any(one.value == "zero_bubble" for one in asked) else []
    found = dict.fromkeys(one for one in why if one is not None)
    return text("left out of limits", why="; ".join(found)) if found else ""


def none_left(limits: Sequence[str], found: str) -> str:
    """Return that no way to arrange the ranks keeps to these limits, and what was found instead."""
    asked = text("keeps to limits", limits=", ".join(map(repr, limits))) if limits else text("computes the model")
    return text("no arrangement", asked=asked, found=found)


def left_out_in_stages(searched: Iterable[Arrangement], unsplit: str | None) -> Iterator[str]:
    """Yield what of stages and micro-batches was not searched.

    Args:
        searched: The arrangements that were.
        unsplit: Why no backward pass of them is in two parts (`why_unsplit`).
    """
    yield text("left out accumulation")
    in_stages = [at for at in searched if at.stages > 1]
    if any(at.model > 1 for at in in_stages):
        yield text("left out staged parts")
    if in_stages:
        yield unsplit or text("left out zero bubble")
