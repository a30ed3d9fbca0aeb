"""What ranks exchange in a step under a candidate of the planner: which collectives, and of how many bytes (pure).

Read off the prices themselves: seconds are linear in those of collectives, so a step in which one kind and size takes a
second, and all else nothing, takes as many seconds as there are such collectives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from phalanx.auto.capture.layers import Layers
from phalanx.auto.cost.collectives import Layout
from phalanx.auto.cost.machine_model import Speed
from phalanx.auto.planner.candidate_cost import borders_of, collectives_of, stages_of
from phalanx.auto.planner.planner import Candidate
from phalanx.cluster.calibration.figures import Kind

Sent = tuple[Kind, float]
"""Kind of a collective and its bytes, as `phalanx.cluster.calibration.figures` counts them."""


def traffic(candidate: Candidate, layers: Layers, speed: Speed, stage: int = 0) -> Counter[Sent]:
    """Return how often each collective runs on a rank in a step, and what it sends to other stages.

    Gradients of one layer may be a part of a bucket: they count as that part of a collective of the bucket's bytes.
    What passes from one stage to the next in a micro-batch is one send, of however many tensors.

    Args:
        candidate: How the model is computed.
        layers: The model.
        speed: How fast the ranks are, of which nothing is asked but how it prices layers.
        stage: The rank's place along the stages.
    """
    at = candidate.arrangement
    mine = [place for place, one in enumerate(stages_of(candidate, layers)) if one % at.stages == stage]
    priced = _Priced()
    _seconds(candidate, layers, speed, priced, mine)
    found = Counter({one: _seconds(candidate, layers, speed, _Priced(one), mine) for one in priced.met})
    for before, size in enumerate(borders_of(candidate, layers)):
        # Forward from the one, gradients back from the other.
        found["send", size] += at.micro_batches * [before % at.stages, (before + 1) % at.stages].count(stage)
    return Counter({sent: count for sent, count in found.items() if count})


@dataclass(slots=True)
class _Priced:
    """Prices of collectives: a second for one of them."""

    of: Sent | None = None
    met: dict[Sent, None] = field(default_factory=dict)

    def __call__(self, kind: Kind, size: float, layout: Layout) -> float:
        if layout.ranks == 1 or not size:
            return 0.0
        self.met[kind, size] = None
        return float((kind, size) == self.of)


def _seconds(candidate: Candidate, layers: Layers, speed: Speed, priced: _Priced, mine: list[int]) -> float:
    options = collectives_of(candidate, layers, speed, priced)
    each = candidate.arrangement.micro_batches
    return sum(each * (options[i].forward_s + options[i].backward_s) + options[i].exchange_s for i in mine)
