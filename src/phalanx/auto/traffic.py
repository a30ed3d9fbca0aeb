"""What ranks exchange in a step under a candidate of the planner: which collectives, and of how many bytes (pure).

Read off the prices themselves: seconds are linear in those of collectives, so a step in which one kind and size takes a
second, and all else nothing, takes as many seconds as there are such collectives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from phalanx.auto.collective_cost import Layout
from phalanx.auto.layer_work import LayerWork
from phalanx.auto.layers import Layers
from phalanx.auto.planner import Candidate
from phalanx.auto.rates import Speed
from phalanx.auto.way_cost import WayCost
from phalanx.cluster.measured import Kind

Sent = tuple[Kind, float]
"""Kind of a collective and its bytes, as `phalanx.cluster.measured` counts them."""


def traffic(candidate: Candidate, layers: Layers) -> Counter[Sent]:
    """Return how often each collective runs on a rank in a step.

    Gradients of one layer may be a part of a bucket: they count as that part of a collective of the bucket's bytes.

    Args:
        candidate: How the model is computed, without stages: a rank of a stage has the layers of that stage alone.
        layers: The model.
    """
    if candidate.arrangement.stages > 1:
        raise ValueError(f"traffic is that of all layers, and each rank of {candidate.arrangement} has some")
    work = LayerWork(layers.captured, layers.segments, layers.blocks, _Free())
    priced = _Priced()
    _seconds(candidate, layers, work, priced)
    return Counter({one: _seconds(candidate, layers, work, _Priced(one)) for one in priced.met})


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


def _seconds(candidate: Candidate, layers: Layers, work: LayerWork, priced: _Priced) -> float:
    cost = WayCost(layers, work, candidate.arrangement, Speed(_Free(), priced, contention=0.0))
    picked = zip(work.all, candidate.picked, strict=True)
    options = [option for one, way in picked for option in cost.options(one, (way,))]
    return sum(one.forward_s + one.backward_s + one.exchange_s for one in options)


class _Free:
    """Operators that take no time."""

    def _no_time(self, *_: object, **__: object) -> float:
        return 0.0

    matmul_s = conv_s = attention_s = operator_s = optimizer_s = _no_time
