"""`count_traffic`: count the collectives and bytes that a rank sends per step under an assignment (pure).

Read off the prices themselves: seconds are linear in those of collectives, so a step in which one kind and size takes a
second, and all else nothing, takes as many seconds as there are such collectives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from phalanx.auto.cost.collectives import GroupTopology
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.planner.assignment import Assignment, list_border_bytes, list_comm_costs, list_stages
from phalanx.cluster.calibration.figures import Kind

Transfer = tuple[Kind, float]
"""Kind of a collective and its bytes, as `phalanx.cluster.calibration.figures` counts them."""


def count_traffic(assignment: Assignment, work: LayerWork, stage: int = 0) -> Counter[Transfer]:
    """Return how often each collective runs on a rank in a step, and what it sends to other stages.

    Gradients of one layer may be a part of a bucket: they count as that part of a collective of the bucket's bytes.
    What passes from one stage to the next in a micro-batch is one send, of however many tensors.

    Args:
        assignment: How the model is computed.
        work: Of the model on a machine, of which nothing is asked but how it prices layers.
        stage: The rank's place along the stages.
    """
    config, layers = assignment.config, work.layers
    mine = [
        position
        for position, stage_of_call in enumerate(list_stages(assignment, layers))
        if stage_of_call % config.stages == stage
    ]
    priced = _UnitPrices()
    _seconds(assignment, work, priced, mine)
    counts = Counter(
        {stage_of_call: _seconds(assignment, work, _UnitPrices(stage_of_call), mine) for stage_of_call in priced.met}
    )
    for before, size in enumerate(list_border_bytes(assignment, layers)):
        # Forward from the one, gradients back from the other.
        counts["send", size] += config.micro_batches * [before % config.stages, (before + 1) % config.stages].count(
            stage
        )
    return Counter({sent: count for sent, count in counts.items() if count})


@dataclass(slots=True)
class _UnitPrices:
    """Prices of collectives: a second for one of them."""

    of: Transfer | None = None
    met: dict[Transfer, None] = field(default_factory=dict)

    def __call__(self, kind: Kind, size: float, layout: GroupTopology) -> float:
        if layout.ranks == 1 or not size:
            return 0.0
        self.met[kind, size] = None
        return float((kind, size) == self.of)


def _seconds(assignment: Assignment, work: LayerWork, priced: _UnitPrices, mine: list[int]) -> float:
    options = list_comm_costs(assignment, work, priced)
    each = assignment.config.micro_batches
    return sum(each * (options[i].forward_s + options[i].backward_s) + options[i].grad_sync_s for i in mine)
