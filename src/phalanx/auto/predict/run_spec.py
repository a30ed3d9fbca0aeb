"""`RunSpec`: schema of a transformer training run: model, cluster, parallel degrees, batch."""

from __future__ import annotations

import logging
from math import prod
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, model_validator

from phalanx.auto.predict.stack import STACKS, Stack, StackName, recognise
from phalanx.cluster.spec.cluster import Cluster, read_cluster
from phalanx.cluster.spec.devices import Device, find_preset
from phalanx.i18n import tr

logger = logging.getLogger("phalanx.auto")

Axis = Literal["tp", "cp", "dp", "pp"]
Order = Literal["tp-dp-pp", "tp-pp-dp", "dp-tp-pp"]
ORDERS: tuple[Order, ...] = ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp")
"""Orders of the ranks: those of the first axis are neighbours, those of the last are furthest apart."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelOf(_Part):
    """A transformer: attention and feed-forward blocks between an embedding and a projection to the vocabulary."""

    kind: Literal["gpt"] = "gpt"
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int | None = Field(default=None, gt=0)
    ffn: int | None = Field(default=None, gt=0)
    gated: bool = False
    seq: int = Field(gt=0)
    vocab: int = Field(gt=0)
    tied: bool = True
    experts: int = Field(default=0, ge=0)
    top_k: int = Field(default=0, ge=0)
    moe_ffn: int | None = Field(default=None, gt=0)
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


class ClusterOf(_Part):
    """Nodes of equal devices; words, files and clusters of other nodes come to these."""

    device: str
    per_node: int = Field(gt=0)
    nodes: int = Field(gt=0)
    node_gbps: float = Field(gt=0)
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


class ParallelOf(_Part):
    """Degree of each kind of parallelism."""

    tp: int = Field(default=1, gt=0)
    pp: int = Field(default=1, gt=0)
    dp: int = Field(default=1, gt=0)
    cp: int = Field(default=1, gt=0)
    ep: int = Field(default=1, gt=0)
    vpp: int = Field(default=1, gt=0)
    zero: Literal[0, 1, 2, 3] = 0
    hsdp: int = Field(default=1, gt=0)
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


class BatchOf(_Part):
    """Sequences of a step."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    whole: int = Field(gt=0, alias="global")
    micro: int = Field(gt=0)


class OverlapOf(_Part):
    """Which communication runs beside computation."""

    dp: bool = True
    tp: bool = False
    pp: bool = True


class RunSpec(_Part):
    """One run spec; the format is that of docs/predict.md."""

    name: str
    model: ModelOf
    cluster: ClusterOf
    parallel: ParallelOf
    batch: BatchOf
    precision: Literal["bf16", "fp16", "fp8", "fp32"]
    recompute: Literal["none", "selective", "full"]
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    overlap: OverlapOf = OverlapOf()
    compile: bool = False
    software: str = ""
    stack: StackName | None = None
    """Which family of software; read from `software` where it is not named."""
    source: str = ""
    measured: dict[str, Any] = Field(default_factory=dict)
    derived: list[str] = Field(default_factory=list)
    assumed: list[str] = Field(default_factory=list)
    group: str | None = None
    grid: str | None = None
    scaling: str | None = None
    doubt: bool | str = False
    memory_kind: str | None = None
    note: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> RunSpec:
        par = self.parallel
        devices = self.cluster.per_node * self.cluster.nodes
        if par.ranks > devices:
            raise ValueError(
                tr(
                    "tp x pp x dp x cp is {ranks}, and the cluster has {devices} devices",
                    ranks=par.ranks,
                    devices=devices,
                )
            )
        if self.batch.whole < par.dp:
            raise ValueError(
                tr(
                    "batch.global ({rows}) must be dp ({copies}) or more: each replica reads a sequence at least",
                    rows=self.batch.whole,
                    copies=par.dp,
                )
            )
        if par.dp % par.hsdp:
            raise ValueError(tr("hsdp ({copies}) must divide dp ({data})", copies=par.hsdp, data=par.dp))
        return self

    @model_validator(mode="after")
    def _has_possible_shape(self) -> RunSpec:
        if (why := find_shape_conflict(self.model, self.parallel)) is not None:
            raise ValueError(why)
        return self

    @property
    def device(self) -> Device:
        """The accelerator it runs on."""
        return self.cluster.figures or find_preset(self.cluster.device)

    @property
    def replica_batch(self) -> int:
        """Sequences of a step of one replica; of the fullest where the batch does not divide over them."""
        return -(-self.batch.whole // self.parallel.dp)

    @property
    def micro(self) -> float:
        """Sequences of a micro-batch of one replica."""
        return min(self.batch.micro, self.replica_batch)

    @property
    def micro_batches(self) -> float:
        """Micro-batches of a replica in one step; not whole if the last one is smaller."""
        return self.replica_batch / self.micro

    @property
    def expert_load(self) -> float:
        """Tokens that come to the busiest rank over an even share; all that the ranks have at most."""
        return min(self.model.expert_load, self.parallel.ep)

    @property
    def sharded_model(self) -> ModelOf:
        """The model with a head of keys and values for every tensor parallel rank: of fewer they hold copies."""
        ranks = self.parallel.tp
        return self.model if self.model.keys_heads >= ranks else self.model.model_copy(update={"kv_heads": ranks})

    @property
    def block_parameters(self) -> float:
        """Parameters of one block on one rank."""
        model, par = self.sharded_model, self.parallel
        experts = max(1, model.experts) / (par.ep if model.experts else 1)
        return (model.attention_parameters + experts * model.expert_parameters) / par.tp

    @property
    def stack_name(self) -> StackName | None:
        """The family of its software; None where neither `stack` nor `software` tells."""
        return self.stack or recognise(self.software, has_8_bit="fp8" in self.device.flops)

    @property
    def habits(self) -> Stack:
        """The kernels and habits of its software; those of `generic` where it is not told."""
        return STACKS[self.stack_name or "generic"]

    @property
    def splits_softmax(self) -> bool:
        """Whether the softmax of Megatron and its kin is five operators, for their one kernel does not take the scores.

        It takes those of four heads at once, of 17 to 4,096 keys.
        """
        own = self.micro * self.model.heads / self.parallel.tp
        fits = own % 4 == 0 and self.model.seq % 4 == 0 and 16 < self.model.seq <= 4096
        return self.habits.fuses and not self.compile and self.precision != "fp32" and not fits

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of gradients that are scattered to shards: float32 unless the run says otherwise."""
        return 2 if "low-precision" in self.software.lower() else 4

    @property
    def accumulated_bytes(self) -> int:
        """Bytes of an element of gradients that are whole on each replica: Megatron adds up bf16 in float32."""
        return 4 if self.precision == "fp32" or (self.precision == "bf16" and self.habits.adds_in_products) else 2

    @property
    def reduced_bytes(self) -> float:
        """Bytes of an element that replicas send to add up gradients, of the mean of both ways.

        A sharded optimizer sends parameters in 16 bit on the way back.
        """
        there, back = self.accumulated_bytes, 4 if self.precision == "fp32" else 2
        return float(there) if self.parallel.zero == 0 else (there + back) / 2

    @property
    def measured_step_time_s(self) -> float | None:
        """Seconds of a step as measured, if something is stated that gives them."""
        if "step_time_s" in self.measured:
            return float(self.measured["step_time_s"])
        if "tokens_per_s_per_device" in self.measured:
            tokens = self.batch.whole * self.model.seq / self.parallel.ranks
            return tokens / float(self.measured["tokens_per_s_per_device"])
        return None
