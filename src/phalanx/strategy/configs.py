"""Typed dictionaries of a strategy's settings (`amp_configs`, `sharding_configs`, ...), in Fleet's names.

Names and defaults are Fleet's; ours are marked. A strategy holds a dictionary with the keys that were set;
`DistributedStrategy.configs` reads it with defaults for the others, and `docs/strategy.md` is made from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
Degree = Annotated[int, Field(ge=-1)]


def _no_switch(value: Any) -> Any:
    """Refuse a switch where a number is meant, which Python would take for 1; text such as 1e-3 of YAML may be one."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


Number = Annotated[float, BeforeValidator(_no_switch), Field(strict=False, allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, lt=1)]
Names = list[str]


def _no_effect(why: str) -> Any:
    """Return the field of a key that is accepted and has no effect."""
    return Field(default=None, json_schema_extra={"no_effect": why})


class Configs(BaseModel):
    """Keys of a dictionary. None stands for a key that was left out, and is no value to set."""

    # Validators are built only for classes that are made by themselves: a strategy checks with those of `KeysOf`.
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, defer_build=True)

    @classmethod
    def keys_without_effect(cls) -> dict[str, str]:
        """Return the keys that are accepted and have no effect, with the reason."""
        extras = {key: field.json_schema_extra for key, field in cls.model_fields.items()}
        return {key: str(extra["no_effect"]) for key, extra in extras.items() if isinstance(extra, dict)}


@dataclass(frozen=True)
class KeysOf:
    """Annotates a dictionary: it has keys of this class alone, any of them left out."""

    configs: type[Configs]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema by which pydantic validates the dictionary."""
        hints = get_type_hints(self.configs, include_extras=True)
        return core_schema.typed_dict_schema(
            {
                key: core_schema.typed_dict_field(handler.generate_schema(_without_none(hints[key])), required=False)
                for key in self.configs.model_fields
            },
            extra_behavior="forbid",
            config=core_schema.CoreConfig(strict=True),
        )


def _without_none(annotation: Any) -> Any:
    parts = get_args(annotation)
    return parts[0] if get_origin(annotation) in (Union, UnionType) and NoneType in parts else annotation


class ASyncConfigs(Configs):
    """How workers and parameter servers work together."""

    k_steps: Annotated[int, Field(ge=-1)] = 0
    """Above 0: geo mode. Each worker trains a copy and sends the copy's difference after this number of steps. 0 or -1:
    no geo."""

    max_merge_var_num: Count = 1
    """In half-async mode: number of steps whose gradients a worker adds up and sends together."""

    half_async: bool = False
    """Not in Fleet. Half-async mode: a worker sends the sum of `max_merge_var_num` steps and waits until it is
    applied."""

    staleness: Count | None = None
    """Not in Fleet. Bounded staleness: no worker is more than this number of steps ahead of the slowest."""

    dense: Literal["server", "all_reduce"] = "server"
    """Not in Fleet. Where dense parameters live: on the servers, like the rows, or on every worker, where their
    gradients are averaged in each step (hybrid mode)."""

    local_optimizer: bool = False
    """Not in Fleet. Whether geo mode may use an update rule other than SGD; the state of the rule stays on each
    worker."""

    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """Not in Fleet. The type in which rows and their gradients are sent between workers and servers; servers store and
    log float32. bfloat16: half the bytes, and each value is rounded by at most 1/256 of itself."""

    send_queue_size: Count | None = _no_effect("queues to the servers are bounded by bytes")
    min_send_grad_num_before_recv: Count | None = _no_effect("rows are read when a forward pass asks for them")
    thread_pool_size: Count | None = _no_effect("one connection per server carries all tables")
    send_wait_times: Count | None = _no_effect("nothing waits for more gradients to come")
    independent_recv_thread: bool | None = _no_effect("rows are read when a forward pass asks for them")
    launch_barrier: bool | None = _no_effect("workers wait for servers and each other whenever they need to")


class AmpConfigs(Configs):
    """Mixed precision."""

    dtype: Literal["bfloat16", "float16"] | None = None
    """Not in Fleet. Type of the arithmetic. Left out: bfloat16, or float16 with `use_pure_fp16`."""

    use_pure_fp16: bool = False
    """Parameters in float16 too, with a float32 copy in the optimizer."""

    use_pure_bf16: bool = False
    """Parameters in bfloat16 too, with a float32 copy in the optimizer."""

    init_loss_scaling: Positive = 32768.0
    """First factor by which the loss is multiplied. This key and the next five apply to float16 only."""

    incr_every_n_steps: Count = 1000
    """Steps without an overflow after which the factor rises."""

    decr_every_n_nan_or_inf: Count = 2
    """Overflows after which the factor falls."""

    incr_ratio: Annotated[Number, Field(ge=1)] = 2.0
    """The factor is multiplied by this number when it rises."""

    decr_ratio: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """The factor is multiplied by this number when it falls."""

    use_dynamic_loss_scaling: bool = True
    """Whether the factor changes at all."""

    custom_white_list: Names | None = _no_effect("torch's autocast decides by operator")
    custom_black_list: Names | None = _no_effect("torch's autocast decides by operator")
    custom_black_varnames: Names | None = _no_effect("torch's autocast decides by operator")
    use_fp16_guard: bool | None = _no_effect("the whole forward pass and the loss are under autocast")
    use_optimizer_fp16: bool | None = _no_effect("the optimizer always updates float32 values")


class RecomputeConfigs(Configs):
    """Activation checkpointing: activations that are recomputed in the backward pass instead of kept."""

    checkpoints: Names = []
    """Names of the modules, as `named_modules` says, or patterns of them; the model's direct children when empty."""

    enable_offload: bool = False
    """Keep the inputs of those modules in host memory instead of the device's."""

    selective: bool = False
    """Not in Fleet. Keep the results of matrix products and convolutions, and recompute the rest."""

    checkpoint_shape: list[int] | None = _no_effect("offloaded tensors keep their shape")
    enable_tuning: bool | None = _no_effect("nothing chooses modules to recompute; name them in checkpoints")
    refined_ops_patterns: list[Any] | None = _no_effect("selective=True keeps matrix products and convolutions")


class GradientMergeConfigs(Configs):
    """Gradient accumulation: several batches make one update."""

    k_steps: Count = 1
    """Number of batches."""

    avg: bool = True
    """True: the update uses the mean gradient of the batches; False: the sum."""


class LocalSgdConfigs(Configs):
    """Ranks that take local steps and average their parameters."""

    k_steps: Count = 1
    """Steps between two averages."""

    begin_step: Count = 1
    """First step in which ranks take local steps; before it, gradients are averaged as usual."""


class AdaptiveLocalSgdConfigs(Configs):
    """Ranks that take local steps; the number of steps is chosen from the loss."""

    init_k_steps: Count = 1
    """Steps between the first two averages."""

    begin_step: Count = 1
    """First step in which ranks take local steps; before it, gradients are averaged as usual."""


class DgcConfigs(Configs):
    """Gradients of which only the largest entries are sent."""

    rampup_begin_step: Size = 0
    """First step that compresses."""

    rampup_step: Count = 1
    """Number of steps over which training goes through the list `sparsity`."""

    sparsity: Annotated[list[Share], Field(min_length=1)] = [0.999]
    """Shares of the entries that are not sent, one after the other."""


class LarsConfigs(Configs):
    """Layer-wise rates for SGD with momentum."""

    lars_coeff: Positive = 0.001
    """Trust coefficient."""

    lars_weight_decay: NotNegative = 0.0005
    """Weight decay."""

    epsilon: NotNegative = 0.0
    """Added to the denominator of the rate."""

    exclude_from_weight_decay: Names = []
    """Parameters whose name contains one of these words are not decayed."""


class LambConfigs(Configs):
    """Layer-wise rates for Adam."""

    lamb_weight_decay: NotNegative = 0.01
    """Weight decay."""

    exclude_from_weight_decay: Names = []
    """Parameters whose name contains one of these words are not decayed."""


class ShardingConfigs(Configs):
    """Ranks that hold a part of optimizer state, gradients and parameters each (ZeRO)."""

    stage: Literal[1, 2, 3] = 1
    """3 gathers the parameters for the forward and again for the backward pass. 1 and 2 gather them once for both."""

    sharding_degree: Degree = -1
    """Number of ranks that share one copy of the state; -1: all ranks. Further ranks hold further copies."""

    units: Names = []
    """Not in Fleet. Modules whose parameters are gathered together (stage 3); the model's direct children when
    empty."""

    optimize_offload: bool = False
    """Keep the shards in host memory."""

    mirror: Literal[0, 1] = 0
    """Not in Fleet. 1: each rank also stores the optimizer state of the next rank, so that no state is lost if a rank
    is lost (`phalanx run -n a:b`)."""

    segment_strategy: str | None = _no_effect("units say what is gathered together")
    sharding_segment_strategy: str | None = _no_effect("units say what is gathered together")
    segment_broadcast_MB: Positive | None = _no_effect("units say what is gathered together")  # noqa: N815
    segment_anchors: Names | None = _no_effect("units say what is gathered together")
    mp_degree: Count | None = _no_effect("hybrid_configs make the mesh")
    dp_degree: Degree | None = _no_effect("hybrid_configs make the mesh")
    pp_degree: Count | None = _no_effect("hybrid_configs make the mesh")
    hybrid_dp: bool | None = _no_effect("ranks beyond sharding_degree hold further copies")
    gradient_merge_acc_step: Count | None = _no_effect("gradient_merge accumulates")
    optimize_cast: bool | None = _no_effect("amp says what is cast")
    pp_allreduce_in_optimize: bool | None = _no_effect("gradients are reduced before the update")
    enable_tuning: bool | None = _no_effect("nothing searches for the degree")
    use_calc_stream: bool | None = _no_effect("collectives run where torch runs them")


class PipelineConfigs(Configs):
    """Stages of layers, which pass micro-batches from one to the next."""

    accumulate_steps: Count = 1
    """Micro-batches of one step."""

    micro_batch_size: Count | None = None
    """Samples of a micro-batch. Left out: the batch split into `accumulate_steps`."""

    schedule_mode: Literal["1F1B", "F-then-B", "GPipe", "Interleaved", "ZeroBubble"] = "1F1B"
    """Order of the micro-batches. `F-then-B` is Fleet's word for GPipe."""

    cuts: Names = []
    """Not in Fleet. Modules at which a new stage begins. When empty: stages with about the same number of
    parameters."""

    virtual: Count = 1
    """Not in Fleet. Stages held by each rank (Interleaved)."""

    p2p_cache_shape: bool | None = _no_effect("shapes are known before the first step")
    enable_partial_send_recv: bool | None = _no_effect("full activations are sent")


class TensorParallelConfigs(Configs):
    """Layers that are sharded over ranks."""

    tensor_parallel_degree: Count | None = None
    """Ranks that together hold one copy of the layers; the same as `mp_degree` in `hybrid_configs`."""

    tensor_init_seed: Annotated[int, Field(ge=-1)] | None = _no_effect(
        "shards are taken from the initial values of the layer"
    )


class ContextParallelConfigs(Configs):
    """Not in Fleet. Ranks that compute parts of the same sequences."""

    degree: Count | None = None
    """Ranks that together compute a sequence; the same as `sep_degree` in `hybrid_configs`."""

    attention: Literal["all_gather", "ring"] = "all_gather"
    """How attention gets the keys and values of other ranks. `all_gather`: each rank gathers all of them, and keeps
    them for the backward pass. `ring`: they are passed around the ranks in both passes, and no rank holds all of
    them."""


class ExpertParallelConfigs(Configs):
    """Not in Fleet. Ranks that hold the experts of a mixture together."""

    degree: Count | None = None
    """Ranks that together hold one copy of the experts; the same as `ep_degree` in `hybrid_configs`."""


class HybridConfigs(Configs):
    """The mesh: how many ranks each kind of parallelism has."""

    dp_degree: Degree = -1
    """Number of data-parallel replicas; -1: all ranks that the other degrees leave."""

    mp_degree: Count | None = None
    """Ranks that hold one copy of the sharded layers; the same as the degree in `tensor_parallel_configs`."""

    pp_degree: Count | None = None
    """Stages of the pipeline."""

    sharding_degree: Count | None = None
    """Ranks that share one copy of the state; the same as the degree in `sharding_configs`."""

    sep_degree: Count | None = None
    """Ranks that compute parts of the same sequences; the same as the degree in `context_parallel_configs`."""

    ep_degree: Count | None = None
    """Ranks that together hold one copy of the experts; the same as the degree in `expert_parallel_configs`. Each of
    them reads different samples, as the replicas of `dp_degree` do."""

    order: list[Literal["dp", "pp", "sharding", "ep", "sep", "mp"]] = ["dp", "pp", "sharding", "ep", "sep", "mp"]
    """The axes of the mesh, outermost first: ranks along the last axis have consecutive numbers."""

    cp_degree: Count | None = _no_effect("sep_degree shards sequences")
    moe_sharding_degree: Count | None = _no_effect("copies of experts are averaged over dp_degree")
    cp_sharding_degree: Count | None = _no_effect("sep_degree shards sequences")
    enable_optimizer_timer: bool | None = _no_effect("the event file has the time of each step")
    split_norm_comm: bool | None = _no_effect("one all-reduce per group of ranks carries all norms")
    mp_configs: dict[str, Any] | None = _no_effect("tensor_parallel has no tuning switches")
    pp_configs: dict[str, Any] | None = _no_effect("the schedule decides")
    sharding_configs: dict[str, Any] | None = _no_effect("strategy.sharding_configs decides")


class ClipConfigs(Configs):
    """Not in Fleet. How gradients are clipped before the update."""

    norm: Positive | None = None
    """Largest norm of all gradients together."""

    value: Positive | None = None
    """Largest absolute value of an entry."""


class EmaConfigs(Configs):
    """Not in Fleet. An exponential moving average of the parameters."""

    decay: Share = 0.999
    """Share of the old average that remains after each step."""

    warmup: bool = True
    """True: the decay is smaller in the first steps, so that the average forgets the initial weights sooner."""
