"""`ElasticStart`: what an elastic attempt of this node begins with: alone, with other nodes, or in a job that runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.cluster.view import View
from phalanx.launch.elastic.membership import Membership, SizeLimits
from phalanx.launch.elastic.nodes.job_key import JobKey
from phalanx.launch.elastic.nodes.mesh import NodeMesh
from phalanx.launch.elastic.nodes.node_group import NodeGroup, NodePlace
from phalanx.launch.job.elastic_meeting import ElasticMeeting
from phalanx.launch.request.request import LaunchRequest
from phalanx.launch.request.topology import NodeOffer, Topology, build_topology


@dataclass(kw_only=True)
class ElasticStart:
    """The place of this node in an elastic job."""

    request: LaunchRequest
    offer: NodeOffer
    meeting: ElasticMeeting | None = None
    """Where the others were met; None in a job of one node."""

    group: NodeGroup = field(init=False)

    def __post_init__(self) -> None:
        nodes, limits = self.request.nodes, self.request.elastic
        assert limits is not None
        alone = NodeMesh(node=0, addresses={}, node_count=1, listening=None, key=JobKey(b""), hello=dict)
        self.group = NodeGroup(
            mesh=alone if self.meeting is None else self.meeting.mesh,
            membership=Membership(SizeLimits(limits.least_ranks, limits.most_ranks)),
            places={offer.node_rank: _place(offer) for offer in self.offers},
            job_id=self.remote_state.get("job_id", self.offers[0].job_id),
            names=tuple(nodes.name(node) for node in range(nodes.count)),
            form=[] if self.meeting is None else [offer.to_json() for offer in self.meeting.offers],
        )

    @property
    def offers(self) -> list[NodeOffer]:
        """Of the nodes that begin together; of this one alone where the job runs."""
        return [self.offer] if self.meeting is None or not self.meeting.offers else self.meeting.offers

    @property
    def remote_state(self) -> dict[str, Any]:
        """What the nodes of a running job know; empty where the job starts."""
        return {} if self.meeting is None else self.meeting.remote_state

    @property
    def initial(self) -> tuple[str, ...]:
        """Members that the job starts with, by rank; empty on a node that comes later."""
        if self.remote_state:
            return ()
        return tuple(f"n{offer.node_rank}.{k}" for offer in self.offers for k in range(_count(offer)))

    def topology(self, log_dir: str, *, per_rank_dir: bool) -> Topology:
        """Return the job as it starts, or what this node adds to one that runs: no rank yet."""
        offers = self.offers
        index = [offer.node_rank for offer in offers].index(self.offer.node_rank)
        layout = build_topology(offers, index, {}, log_dir, per_rank_dir=per_rank_dir, is_elastic=True)
        if not self.remote_state:
            return layout
        host, _, port = View.from_json(self.remote_state["view"]).store.rpartition(":")
        return replace(layout, job_id=self.group.job_id, master=(host, int(port)), local=())

    def replay(self) -> None:
        """Take messages of other nodes that came before the attempt."""
        for node, message in self.meeting.early if self.meeting is not None else ():
            self.group.take(node, message)


def _place(offer: NodeOffer) -> NodePlace:
    return NodePlace(_count(offer), f"{offer.address}:{offer.store_port}")


def _count(offer: NodeOffer) -> int:
    return len(offer.endpoints["worker"])
