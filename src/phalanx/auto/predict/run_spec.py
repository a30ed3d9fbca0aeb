"""`RunSpec`: schema of a transformer training run: model, cluster, parallel degrees, batch."""

from __future__ import annotations

from math import ceil, gcd, inf
from typing import Any, Literal

from pydantic import Field, model_validator

from phalanx.auto.predict.run_parts import (
    BatchOf,
    ClusterOf,
    ModelOf,
    OverlapOf,
    ParallelOf,
    Part,
    find_shape_conflict,
)
from phalanx.auto.predict.schedule_conflict import find_schedule_conflict
from phalanx.auto.predict.stack import STACKS, Stack, StackName, recognise
from phalanx.cluster.spec.devices import Device, find_preset
from phalanx.i18n import tr
from phalanx.plan.pipeline_order import OrderRules
from phalanx.plan.value import Schedule


class RunSpec(Part):
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
        if self.schedule == "gpipe" and par.vpp > 1:
            raise ValueError(
                tr(
                    "schedule gpipe has one stage per rank, found vpp={virtual}: set vpp to 1, or choose the schedule "
                    "interleaved",
                    virtual=par.vpp,
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

    @model_validator(mode="after")
    def _has_possible_rounds(self) -> RunSpec:
        if (why := find_schedule_conflict(self)) is not None:
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _has_numbers_measured(self) -> RunSpec:
        for name in ("step_time_s", "tokens_per_s_per_device", "memory_gib"):
            value = self.measured.get(name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf
            if value is not None and not is_number:
                raise ValueError(
                    tr("measured.{name} must be a number above 0, found {value!r}", name=name, value=value)
                )
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
        """Micro-batches of a replica in one step; a fraction if the last one is smaller."""
        return self.replica_batch / self.micro

    @property
    def round_size(self) -> int:
        """Micro-batches that a rank with several stages takes through one of them before the next.

        As many as stages, or more where they do not divide: in torch all rounds alike. In Megatron Core
        (`microbatch_group_size_per_vp_stage`) the last round may have fewer, but not fewer than stages.
        """
        count, stages = self.full_micro_batches, self.parallel.pp
        if self.is_interleaved and self.habits.pipelines == "megatron-core":
            fits = (size for size in range(stages, count + 1) if not 0 < count % size < stages)
            return next(fits, count)
        return count // max(1, count // stages)

    @property
    def full_micro_batches(self) -> int:
        """Micro-batches of a replica in one step, the last one counted as a full one."""
        return ceil(self.micro_batches)

    @property
    def all_forward_first(self) -> bool:
        """Whether all micro-batches go forward before one goes back.

        Megatron up to 2022 takes interleaved stages so if there are as many micro-batches as stages.
        """
        is_one_round = self.is_interleaved and self.full_micro_batches == self.parallel.pp
        return self.schedule == "gpipe" or (is_one_round and self.habits.pipelines == "megatron")

    @property
    def is_interleaved(self) -> bool:
        """Whether ranks have several stages and do not split their backward passes."""
        return self.parallel.vpp > 1 and self.parallel.pp > 1 and self.schedule in ("1f1b", "interleaved")

    @property
    def order(self) -> Schedule:
        """The schedule of its passes."""
        virtual, kinds = self.parallel.vpp, {"gpipe": "gpipe", "zero-bubble": "zero_bubble"}
        kind = kinds.get(self.schedule, "interleaved" if virtual > 1 else "1f1b")
        return Schedule.model_validate({"kind": kind, "microbatches": self.full_micro_batches, "virtual": virtual})

    @property
    def order_rules(self) -> OrderRules:
        """How its software orders them."""
        size = 0 if self.is_v else self.round_size
        return OrderRules(round_size=size, few_in_turn=True, all_forward_first=self.all_forward_first)

    @property
    def stage_blocks(self) -> list[int]:
        """Blocks of every stage: equal numbers, the first ones have one more where they do not divide."""
        layers, stages = self.model.layers, self.parallel.pp * self.parallel.vpp
        return [layers // stages + (stage < layers % stages) for stage in range(stages)]

    @property
    def is_v(self) -> bool:
        """Whether two stages a rank lie as a V: the first rank has the first stage and the last (torch's ZBV)."""
        return self.schedule == "zero-bubble" and self.parallel.vpp == 2 and self.parallel.pp > 1

    @property
    def has_one_end(self) -> bool:
        """Whether one rank has both tables of the vocabulary."""
        return self.parallel.pp == 1 or self.is_v

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
    def stage_ranks(self) -> int:
        """Ranks of one stage: experts are dealt to them."""
        par = self.parallel
        return par.tp * par.cp * par.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that one expert is cut over: those of `tp`, or fewer if experts are dealt to ranks of `tp` too."""
        return gcd(self.parallel.tp, self.stage_ranks // self.parallel.ep)

    @property
    def dense_parameters(self) -> float:
        """Parameters of one block on one rank, experts left out."""
        model = self.sharded_model
        return (model.attention_parameters + (0 if model.experts else model.expert_parameters)) / self.parallel.tp

    @property
    def expert_parameters(self) -> float:
        """Parameters of the experts of one block on one rank."""
        model = self.model
        return model.experts / self.parallel.ep * model.expert_parameters / self.expert_tp

    @property
    def block_parameters(self) -> float:
        """Parameters of one block on one rank."""
        return self.dense_parameters + self.expert_parameters

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

        It takes those of four heads at once, of 17 to 4,096 keys, in 16 bit.
        """
        own = self.micro * self.model.heads / self.parallel.tp
        fits = own % 4 == 0 and self.model.seq % 4 == 0 and 16 < self.model.seq <= 4096
        return self.habits.fuses and not self.compile and (self.precision == "fp32" or not fits)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of activations, and of the parameters that passes compute with.

        Only products take operands in 8 bit; what they return, and all else, stays in 16.
        """
        return 4 if self.precision == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of gradients that are scattered to shards: float32 unless the run says otherwise."""
        return 2 if "low-precision" in self.software.lower() else 4

    @property
    def accumulated_bytes(self) -> int:
        """Bytes of an element of gradients that are whole on each replica: Megatron adds up bf16 in float32."""
        return 4 if self.precision == "fp32" or (self.precision == "bf16" and self.habits.adds_in_products) else 2

    @property
    def measured_step_time_s(self) -> float | None:
        """Seconds of a step as measured, if something is stated that gives them."""
        if (seconds := self.measured.get("step_time_s")) is not None:
            return float(seconds)
        if (rate := self.measured.get("tokens_per_s_per_device")) is not None:
            return self.batch.whole * self.model.seq / self.parallel.ranks / float(rate)
        return None
