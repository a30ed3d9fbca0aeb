"""`MachineModel`: operator and collective times of a cluster, measured or from data sheets (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from phalanx.auto.cost.collectives import ClusterLinks, GroupTopology
from phalanx.auto.cost.constants import DEFAULT, Constants
from phalanx.auto.cost.kernels import Kernels
from phalanx.cluster.calibration.figures import LAYER_KINDS, Kind, Precision, Rates, Sharding
from phalanx.cluster.spec.cluster import Cluster

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adam": 2}
"""Values that an optimizer keeps for each parameter."""

UPDATE_TEMPORARIES = {"sgd": 0, "momentum": 0, "adam": 2}
"""Values that an optimizer has besides for each entry of the parameter that it updates: the root and the quotient."""

CollectiveTime = Callable[[Kind, float, GroupTopology], float]
"""Seconds of a collective of so many bytes (which: `phalanx.cluster.calibration.figures`), by where its ranks lie."""

ShardingTime = Callable[[Sharding, float, float, GroupTopology], float]
"""Seconds that sharding adds to a step for a unit of so many bytes in so many tensors, by where its ranks lie."""


class OperatorTimes(Protocol):
    """What one rank gets while all ranks work, in seconds; every operator counts with the time to start it."""

    def matmul_s(self, m: float, n: float, k: float, dtype: Precision = "fp32", *, batch: float = 1) -> float:
        """Return the seconds of `batch` products of (m, k) by (k, n), which one operator computes."""

    def conv_s(
        self,
        m: float,
        n: float,
        k: float,
        groups: float = 1,
        *,
        backward: bool = False,
        dtype: Precision = "fp32",
        pointwise: bool = False,
    ) -> float:
        """Return the seconds of a convolution: m places of output, n channels from k values, in each group."""

    def attention_s(self, batch_heads: float, seq: float, head_dim: float, *, backward: bool = False) -> float:
        """Return the seconds of fused attention."""

    def operator_s(self, name: str, size: float, *, backward: bool = False) -> float:
        """Return the seconds of an operator bound by memory, with an input of `size` bytes."""

    def optimizer_s(self, kind: str, elements: float, tensors: float) -> float:
        """Return the seconds of a step of an optimizer, `sgd`, `momentum` or `adam`."""


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Seconds of Python, autograd and copies around operators and collectives; none by default."""

    collective_call_s: float = 0.0
    checkpoint_s: float = 0.0
    selective_op_s: float = 0.0
    layer_s: CollectiveTime | None = None
    """Of a collective as a sharded layer calls it; the collective's own and `collective_call_s` when None."""

    waiting_s: Callable[[float, GroupTopology], float] | None = None
    """Where ranks meet after so many seconds of work, what they wait for the slowest; nothing when None."""

    averaged_s: Callable[[GroupTopology], float] | None = None
    """Of a gradient that is averaged, whatever its size; nothing when None."""

    sharded_s: ShardingTime | None = None
    """Of sharded units; those of their collectives when None."""

    placed_s: Callable[[float, float, GroupTopology], float] | None = None
    """Of so many operators of a module that ranks compute in parts, with so many parameters; twice `selective_op_s` of
    each operator, each way, when None."""

    @classmethod
    def of(cls, constants: Constants) -> HostOverhead:
        """Return those of the constants."""
        return cls(constants.collective_call_s, constants.checkpoint_s, constants.selective_op_s)


@dataclass(frozen=True, slots=True)
class MachineModel:
    """How fast ranks compute and communicate."""

    operators: OperatorTimes
    collective_s: CollectiveTime
    contention: float
    """Extra seconds for each second that collectives and computation share; 1 gains nothing."""

    host: HostOverhead = HostOverhead()
    """What the host takes for each thing that it starts, beside operators."""

    ring_operators: OperatorTimes | None = None
    """Products and passes over memory in float32, of which a ring computes attention where no fused kernel says how
    much a part of the keys counts; None where one does."""


def build_measured_machine(rates: Rates) -> MachineModel:
    """Return the speed of a measured machine, for the number of ranks that the rates are of."""

    def collective_s(kind: Kind, size: float, layout: GroupTopology) -> float:
        return rates.collective_s(kind, size, layout.ranks)

    def layer_s(kind: Kind, size: float, layout: GroupTopology) -> float:
        assert kind in LAYER_KINDS, f"no layer calls {kind}"
        return rates.layer_s(kind, size, layout.ranks)

    def sharded_s(how: Sharding, size: float, tensors: float, layout: GroupTopology) -> float:
        return rates.sharded_s(how, size, tensors, layout.ranks)

    def placed_s(operators: float, parameters: float, layout: GroupTopology) -> float:
        return rates.placed_s(operators, parameters, layout.ranks)

    def waiting_s(work_s: float, layout: GroupTopology) -> float:
        return rates.waiting_s(work_s, layout.ranks)

    def averaged_s(layout: GroupTopology) -> float:
        return rates.averaged_s(layout.ranks)

    host = HostOverhead(
        0.0, rates.checkpoint_s, rates.selective_op_s, layer_s, waiting_s, averaged_s, sharded_s, placed_s
    )
    return MachineModel(rates, collective_s, min(1.0, rates.contention()), host)


def build_datasheet_machine(cluster: Cluster, precision: str = "bf16") -> MachineModel:
    """Return the speed of equal devices, by their data sheets and what `auto/cost/constants` says of all of them."""
    node = cluster.nodes[0]
    links = ClusterLinks(node.device, node.gbps, DEFAULT, node.strided)

    def collective_s(kind: Kind, size: float, layout: GroupTopology) -> float:
        if kind == "all_reduce":
            return links.all_reduce(size, layout)
        if kind == "all_to_all":
            return links.all_to_all(size, layout)
        if kind == "send":
            return links.send(size, across=layout.in_node == 1, sharing=layout.sharing)
        return links.all_gather(size, layout)

    kernels = _EagerKernels(Kernels(node.device, DEFAULT, precision))
    return MachineModel(
        kernels,
        collective_s,
        DEFAULT.contention,
        HostOverhead.of(DEFAULT),
        _EagerKernels(Kernels(node.device, DEFAULT, "fp32")) if "fp32" in node.device.flops else kernels,
    )


@dataclass(frozen=True, slots=True)
class _EagerKernels:
    """Operators of eager code: as fast as their kernels, and no faster than the host starts them."""

    kernels: Kernels

    def matmul_s(self, m: float, n: float, k: float, dtype: Precision = "fp32", *, batch: float = 1) -> float:
        # In the precision of the job, whatever a model's parameters have before it is distributed.
        return self._at_least_launch(self.kernels.matmul(m, n, k, batch=batch))

    def conv_s(
        self,
        m: float,
        n: float,
        k: float,
        groups: float = 1,
        *,
        backward: bool = False,
        dtype: Precision = "fp32",
        pointwise: bool = False,
    ) -> float:
        shapes = ((m, k, n), (n, k, m)) if backward else ((m, n, k),)
        return sum(self._at_least_launch(self.kernels.matmul(*s, batch=groups, backward=backward)) for s in shapes)

    def attention_s(self, batch_heads: float, seq: float, head_dim: float, *, backward: bool = False) -> float:
        masked = 2 * batch_heads * seq * seq * head_dim
        return self._at_least_launch(self.kernels.attention(masked, backward=backward))

    def operator_s(self, name: str, size: float, *, backward: bool = False) -> float:
        return self._at_least_launch(self.kernels.streamed((3 if backward else 2) * size))

    def optimizer_s(self, kind: str, elements: float, tensors: float) -> float:
        # One fused kernel reads gradient, parameter and state in fp32, and writes the last two.
        moved = 4 * elements * (3 + 2 * OPTIMIZER_STATES[kind])
        return self.kernels.streamed(moved) + self.kernels.constants.kernel_gap_s * tensors

    def _at_least_launch(self, seconds: float) -> float:
        return max(seconds, self.kernels.constants.launch_s)
