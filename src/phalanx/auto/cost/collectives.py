"""`ClusterLinks`: cost of collectives by algorithm and topology (alpha-beta model, pure).

A start, a hop for each rank, and bytes over the slowest link (R. Hockney, "The communication challenge for MPP", 1994):
t = alpha + hops x beta + bytes / bandwidth. Groups that lie across nodes side by side share the ports of their nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.auto.cost.constants import Constants
from phalanx.cluster.calibration.figures import Kind
from phalanx.cluster.spec.devices import Device

_COPIED = 0.5
"""Parts of a ring that an all-reduce spends on copies into and out of its buffers: over 2, 4 and 8 A100 it reaches 195,
220 and 235 GB/s (vTrain's and Galvatron's tables, 64 MiB and more)."""


@dataclass(frozen=True, slots=True)
class GroupTopology:
    """Where the ranks of a group lie."""

    ranks: int
    in_node: int
    """Ranks of the group on one node."""

    sharing: int = 1
    """Groups of that kind that use a node's ports at the same time."""


@dataclass(frozen=True, slots=True)
class ClusterLinks:
    """The links of a cluster of equal nodes."""

    device: Device
    node_gbps: float
    """Gb/s of all ports of a node together, one way."""

    constants: Constants
    strided: float = 1.0
    """Share of the ports' rate that groups side by side reach together; see `LayerNode.strided`."""

    def bandwidth(self, layout: GroupTopology) -> float:
        """Return the bytes/s that a group's ring carries."""
        inside = self.device.link * self.constants.link
        if layout.ranks <= layout.in_node:
            return inside
        share = 1.0 if layout.sharing == 1 else self.strided / layout.sharing
        return min(inside, self.node_gbps / 8 * 1e9 * self.constants.network * share)

    def start(self, layout: GroupTopology) -> float:
        """Return the seconds before a collective moves its bytes: up and down a tree of nodes."""
        constants = self.constants
        if layout.ranks <= layout.in_node:
            return constants.link_start_s + constants.link_hop_s * layout.ranks
        return constants.link_start_s + 2 * constants.network_hop_s * math.log2(layout.ranks / layout.in_node)

    def ring_start(self, layout: GroupTopology) -> float:
        """Return the seconds before a gather, a scatter or a send moves its bytes: once round a ring of all ranks."""
        constants = self.constants
        nodes = layout.ranks / min(layout.ranks, layout.in_node)
        within, between = constants.link_hop_s / 2 * (layout.ranks - nodes), constants.network_hop_s * (nodes - 1)
        return constants.link_start_s + within + between

    def _measured_seconds(self, kind: Kind, size: float, layout: GroupTopology) -> float | None:
        """Return what a collective inside a node took where that was measured, else None."""
        rates = self.device.measured
        if rates is None or layout.ranks > layout.in_node or f"{kind} shm {layout.ranks}" not in rates.grids:
            return None
        return rates.collective_s(kind, size, layout.ranks)

    def all_gather(self, whole: float, layout: GroupTopology) -> float:
        """Return the seconds until every rank has `whole` bytes, of which each brought an equal part.

        A reduce-scatter of as many bytes takes as long.
        """
        if layout.ranks == 1:
            return 0.0
        if (seconds := self._measured_seconds("all_gather", whole, layout)) is not None:
            return seconds
        moved = (layout.ranks - 1 + _COPIED / 2) / layout.ranks * whole
        return self.ring_start(layout) + moved / self.bandwidth(layout)

    def all_reduce(self, size: float, layout: GroupTopology) -> float:
        """Return the seconds of an all-reduce of `size` bytes: each byte goes round twice."""
        if layout.ranks == 1:
            return 0.0
        if (seconds := self._measured_seconds("all_reduce", size, layout)) is not None:
            return seconds
        moved = (2 * (layout.ranks - 1) + _COPIED) / layout.ranks * size
        return self.start(layout) + moved / self.bandwidth(layout)

    def all_to_all(self, size: float, layout: GroupTopology) -> float:
        """Return the seconds of an all-to-all in which each rank holds `size` bytes."""
        if layout.ranks == 1:
            return 0.0
        if layout.ranks <= layout.in_node:
            return self.start(layout) + (1 - 1 / layout.ranks) * size / self.bandwidth(layout)
        away = (1 - layout.in_node / layout.ranks) * size * layout.in_node
        return self.start(layout) + away / self.bandwidth(layout)

    def send(self, size: float, *, across: bool, sharing: int) -> float:
        """Return the seconds to send `size` bytes to one neighbour.

        Args:
            size: Bytes.
            across: Whether the neighbour is on another node.
            sharing: Ranks of a node that send at the same time.
        """
        pair = GroupTopology(2, 1 if across else 2, sharing if across else 1)
        return self.ring_start(pair) + size / self.bandwidth(pair)
