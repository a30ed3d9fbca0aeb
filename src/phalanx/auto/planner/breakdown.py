"""The seconds of a step by what takes them (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.auto.capture.layers import Layers, Way
from phalanx.auto.cost.layer_strategy import WayCost
from phalanx.auto.cost.machine_model import Speed
from phalanx.auto.cost.parallel_config import Arrangement
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.auto.solver.pipeline_problem import StagedChoices
from phalanx.auto.solver.problem import Choices
from phalanx.auto.solver.solve import Solved


def sent_by_layers(layers: Layers, work: LayerWork, at: Arrangement, speed: Speed, picked: Sequence[Way]) -> float:
    """Return the seconds of collectives of layers, those of sharding not among them; of stages, of one micro-batch.

    Args:
        layers: The model.
        work: What its segments take.
        at: Of the ranks.
        speed: How fast they are.
        picked: How each segment is computed.
    """
    cost = WayCost(layers, work, replace(at, zero=0), speed)
    return sum(cost.options(one, (way,))[0].sent_s for one, way in zip(work.all, picked, strict=True))


def parts_of(
    choices: Choices | StagedChoices, solved: Solved, is_sharded: bool, layers_s: float | None
) -> dict[str, float]:
    """Return the seconds of a step by what takes them; of stages, what an average rank does.

    With sharding, all that ranks exchange for it is one part: parameters they gather, and gradients they reduce into
    slices.

    Args:
        choices: What could be chosen.
        solved: What was.
        is_sharded: Whether it shards.
        layers_s: As `sent_by_layers` returns it; all collectives that passes wait for when None.
    """
    options = [node.options[solved.pick[node.decision]] for node in choices.nodes]
    sent = sum(one.sent_s for one in options)
    update = sum(one.update_s for one in options)
    passes = sum(one.forward_s + one.backward_s for one in options)
    layers_s = sent if layers_s is None else min(sent, layers_s)
    if isinstance(choices, Choices):
        each, ranks, exchange = 1.0, 1, solved.seconds - choices.fixed_s - passes - update
    else:
        each, ranks = choices.micro_batches / choices.ranks, choices.ranks
        exchange = sum(one.exchange_s for one in options) / ranks
    parts = {
        "compute": each * (passes - sent),
        "collectives of layers": each * layers_s,
        "sharding": each * (sent - layers_s) + (exchange if is_sharded else 0.0),
        "exchange of gradients": 0.0 if is_sharded else exchange,
        "optimizer": update / ranks,
    }
    return {**parts, "stages": 0.0 if isinstance(choices, Choices) else solved.seconds - sum(parts.values())}
