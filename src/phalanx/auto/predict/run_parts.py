"""`ModelOf`, `ClusterOf`, `ParallelOf`, `BatchOf`: parts of a run spec, each checked by itself."""

from __future__ import annotations

import logging
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, model_validator

from phalanx.cluster.spec.cluster import Cluster, read_cluster
from phalanx.cluster.spec.devices import Device
from phalanx.i18n import tr

logger = logging.getLogger("phalanx.auto")

Axis = Literal["tp", "cp", "dp", "pp"]
Order = Literal["tp-dp-pp", "tp-pp-dp", "dp-tp-pp"]
ORDERS: tuple[Order, ...] = ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp")
"""Orders of the ranks: those of the first axis are neighbours, those of the last are furthest apart."""


Count = Annotated[int, Field(gt=0, le=10**9)]
"""More of anything is a slip of the pen, and would not fit into floating point when multiplied."""


class Part(BaseModel):
    """A part of a run spec: a wrong key is an error, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelOf(Part):
    """A transformer: attention and feed-forward blocks between an embedding and a projection to the vocabulary."""

    kind: Literal["gpt"] = "gpt"
    layers: int = Field(gt=0, le=10**6)
    hidden: Count
    heads: Count
    kv_heads: Count | None = None
    ffn: Count | None = None
    gated: bool = False
    seq: Count
    vocab: Count
    tied: bool = True
    experts: int = Field(default=0, ge=0, le=10**9)
    top_k: int = Field(default=0, ge=0)
    moe_ffn: Count | None = None
    expert_load: float = Field(default=1.0, ge=1)
    """Tokens that come to the experts of the busiest rank, over an even share of them."""
    flash: bool = True

    @model_validator(mode="after")
    def _fits(self) -> ModelOf:
        if self.hidden < self.heads:
            raise ValueError(
                tr("hidden ({hidden}) must be heads ({heads}) or more", hidden=self.hidden, heads=self.heads)
            )
        if self.heads % self.keys_heads:
            raise ValueError(
                tr(
                    "heads ({heads}) must be a multiple of kv_heads ({groups})",
                    heads=self.heads,
                    groups=self.keys_heads,
                )
            )
        if bool(self.experts) != bool(self.top_k) or self.top_k > self.experts:
            raise ValueError(
                tr(
                    "experts ({experts}) and top_k ({chosen}) belong together, top_k the smaller",
                    experts=self.experts,
                    chosen=self.top_k,
                )
            )
        if self.expert_load > 1 and not self.experts:
            raise ValueError(tr("expert_load ({load:g}) is of experts, and there are none", load=self.expert_load))
        return self

    @property
    def keys_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """Width of the feed-forward layer, or of one expert."""
        return (self.moe_ffn if self.experts else None) or self.ffn or 4 * self.hidden

    @property
    def qkv(self) -> int:
        """Width of queries, keys and values side by side."""
        return self.hidden + 2 * self.hidden * self.keys_heads // self.heads

    @property
    def attention_parameters(self) -> int:
        """Weights of one block's attention."""
        return self.hidden * self.qkv + self.hidden * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Weights of one feed-forward layer, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def parameters(self) -> int:
        """Weights of the model; biases and norms, below a thousandth, are left out."""
        block = self.attention_parameters + max(1, self.experts) * self.expert_parameters + self.experts * self.hidden
        return self.layers * block + (1 if self.tied else 2) * self.vocab * self.hidden

    def flops_per_token(self) -> float:
        """Return the FLOP of forward and backward that the model needs a token.

        As usual in reports, attention counts as if no score were masked, and recomputation does not count.
        """
        block = self.attention_parameters + max(1, self.top_k) * self.expert_parameters
        return 6 * (self.layers * (block + 2 * self.seq * self.hidden) + self.vocab * self.hidden)


class ClusterOf(Part):
    """Nodes of equal devices; words, files and clusters of other nodes come to these."""

    device: str
    per_node: Count
    nodes: Count
    node_gbps: float = Field(ge=1e-6)
    strided: float = Field(default=1.0, gt=0, le=1)
    figures: InstanceOf[Device] | None = Field(default=None, exclude=True)
    """The device, where it is none of the presets."""
    usd_per_device_hour: float | None = Field(default=None, gt=0)

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all devices; None if it is not known."""
        device = self.usd_per_device_hour
        return None if device is None else device * self.per_node * self.nodes

    @model_validator(mode="before")
    @classmethod
    def _worded(cls, value: Any) -> Any:
        if not isinstance(value, str | Cluster):
            return value
        cluster = read_cluster(value)
        if cluster.assumed:
            logger.warning("%s", tr("assumed of the cluster: {what}", what="; ".join(cluster.assumed)))
        equal = cluster.weakest()
        node = equal.nodes[0]
        if not cluster.is_uniform:
            reckoned = f"{len(equal.nodes)} x ({node.devices} {node.device.name})"
            logger.warning(
                "%s",
                tr(
                    "The nodes differ ({cluster}), and every rank waits for the slowest: counted as {reckoned}. "
                    "Describe some of the nodes alone to see what they would do without the others.",
                    cluster=cluster,
                    reckoned=reckoned,
                ),
            )
        return {
            "device": node.device.name,
            "per_node": node.devices,
            "nodes": len(cluster.nodes),
            "node_gbps": node.gbps,
            "strided": node.strided,
            "figures": node.device,
            "usd_per_device_hour": equal.usd_per_device_hour,
        }


class ParallelOf(Part):
    """Degree of each kind of parallelism."""

    tp: Count = 1
    pp: Count = 1
    dp: Count = 1
    cp: Count = 1
    ep: Count = 1
    vpp: Count = 1
    zero: Literal[0, 1, 2, 3] = 0
    hsdp: Count = 1
    sequence_parallel: bool = False
    order: Order = "tp-dp-pp"

    @property
    def ranks(self) -> int:
        """Devices the run needs; experts are dealt to ranks of the other axes."""
        return self.tp * self.pp * self.dp * self.cp

    def stride(self, axis: Axis) -> int:
        """Return how many ranks apart two neighbours along an axis are: `cp` lies between `tp` and what follows it."""
        axes = self.order.replace("tp", "tp-cp").split("-")
        return prod(getattr(self, inner) for inner in axes[: axes.index(axis)])


def find_shape_conflict(model: ModelOf, par: ParallelOf) -> str | None:
    """Return why a model does not support these degrees; None if it does."""
    if model.layers < par.pp * par.vpp:
        return tr(
            "{layers} layers do not make {stages} x {virtual} stages",
            layers=model.layers,
            stages=par.pp,
            virtual=par.vpp,
        )
    if model.heads % par.tp:
        return tr(
            "model.heads ({heads}) must be a multiple of parallel.tp ({ranks}): each rank computes whole heads",
            heads=model.heads,
            ranks=par.tp,
        )
    if model.keys_heads % par.tp and par.tp % model.keys_heads:
        return tr(
            "one of model.kv_heads ({groups}) and parallel.tp ({ranks}) must divide the other: each rank holds whole "
            "heads of keys and values, copies where there are fewer than ranks",
            groups=model.keys_heads,
            ranks=par.tp,
        )
    if model.inner % par.tp:
        return tr(
            "the feed-forward width ({columns}) must be a multiple of parallel.tp ({ranks}): each rank computes as "
            "much",
            columns=model.inner,
            ranks=par.tp,
        )
    if model.seq % (par.cp * (par.tp if par.sequence_parallel else 1)):
        return tr(
            "model.seq ({tokens}) must be a multiple of parallel.cp ({ranks}), and with sequence_parallel of tp times "
            "that",
            tokens=model.seq,
            ranks=par.cp,
        )
    if par.ep > 1 and (not model.experts or model.experts % par.ep):
        return tr(
            "model.experts ({experts}) must be a multiple of parallel.ep ({ranks}), and above 0 where ep is above 1",
            experts=model.experts,
            ranks=par.ep,
        )
    if (par.tp * par.cp * par.dp) % par.ep:
        return tr(
            "parallel.ep ({experts}) must divide tp x cp x dp ({ranks}): experts are dealt to the ranks of one stage",
            experts=par.ep,
            ranks=par.tp * par.cp * par.dp,
        )
    return None


class BatchOf(Part):
    """Sequences of a step."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    whole: Count = Field(alias="global")
    micro: Count


class OverlapOf(Part):
    """Which communication runs beside computation."""

    dp: bool = True
    tp: bool = False
    pp: bool = True
