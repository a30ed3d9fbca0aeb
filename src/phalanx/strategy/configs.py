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
    """Return the field of a key that is accepted and does not act."""
    return Field(default=None, json_schema_extra={"no_effect": why})


class Configs(BaseModel):
    """Keys of a dictionary. None stands for a key that was left out, and is no value to set."""

    # Validators are built only for classes that are made by themselves: a strategy checks with those of `KeysOf`.
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, defer_build=True)

    @classmethod
    def keys_without_effect(cls) -> dict[str, str]:
        """Return the keys that are accepted and do not act, with the reason."""
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
    """Above 0: geo mode, each worker trains a copy and sends its difference every so many steps. 0 or -1: no geo."""

    max_merge_var_num: Count = 1
    """Steps whose gradients a worker sends as one, in half-async mode."""

    half_async: bool = False
    """Ours. Half-async mode: a worker sends the sum of `max_merge_var_num` steps and waits until it is applied."""

    staleness: Count | None = None
    """Ours. Bounded staleness: no worker is more steps than this ahead of the slowest."""

    dense: Literal["server", "all_reduce"] = "server"
    """Ours. Where dense parameters live: on the servers like the rows, or on every worker, averaged each step
    (hybrid)."""

    local_optimizer: bool = False
    """Ours. Whether geo may train with another rule than SGD, whose state stays with each worker."""

    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """Ours. As what rows of ids and their gradients travel to and from the servers, which keep and log float32.
    bfloat16: half the bytes, each value rounded by at most 1/256 of itself."""

    send_queue_size: Count | None = _no_effect("queues to the servers are bounded by bytes")
    min_send_grad_num_before_recv: Count | None = _no_effect("rows are read when a forward pass asks for them")
    thread_pool_size: Count | None = _no_effect("one connection per server carries all tables")
    send_wait_times: Count | None = _no_effect("nothing waits for more gradients to come")
    independent_recv_thread: bool | None = _no_effect("rows are read when a forward pass asks for them")
    launch_barrier: bool | None = _no_effect("workers wait for servers and each other whenever they need to")


class AmpConfigs(Configs):
    """Mixed precision."""

    dtype: Literal["bfloat16", "float16"] | None = None
    """Ours. Type of the arithmetic. Left out: bfloat16, or float16 with `use_pure_fp16`."""

    use_pure_fp16: bool = False
    """Parameters in float16 too, with a float32 copy in the optimizer."""

    use_pure_bf16: bool = False
    """Parameters in bfloat16 too, with a float32 copy in the optimizer."""

    init_loss_scaling: Positive = 32768.0
    """First factor of the loss; it is scaled with float16 only, as by the next five keys."""

    incr_every_n_steps: Count = 1000
    """Steps without an overflow after which the factor rises."""

    decr_every_n_nan_or_inf: Count = 2
    """Overflows after which it falls."""

    incr_ratio: Annotated[Number, Field(ge=1)] = 2.0
    """By what it is multiplied when it rises."""

    decr_ratio: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """By what it is multiplied when it falls."""

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
    """Ours. Keep the results of matrix products and convolutions, compute the rest again."""

    checkpoint_shape: list[int] | None = _no_effect("offloaded tensors keep the shape they have")
    enable_tuning: bool | None = _no_effect("nothing searches for what to compute again; name it in checkpoints")
    refined_ops_patterns: list[Any] | None = _no_effect("selective=True keeps matrix products and convolutions")


class GradientMergeConfigs(Configs):
    """Micro-batches whose gradients make one update."""

    k_steps: Count = 1
    """How many."""

    avg: bool = True
    """True: the mean of the micro-batches; False: their sum."""


class LocalSgdConfigs(Configs):
    """Ranks that take local steps and average their parameters."""

    k_steps: Count = 1
    """Steps between two averages."""

    begin_step: Count = 1
    """First step in which ranks take local steps; before it, gradients are averaged as usual."""


class AdaptiveLocalSgdConfigs(Configs):
    """Ranks that take local steps; their number follows the loss."""

    init_k_steps: Count = 1
    """Steps between the first two averages."""

    begin_step: Count = 1
    """First step in which ranks take local steps; before it, gradients are averaged as usual."""


class DgcConfigs(Configs):
    """Gradients of which only the largest entries are sent."""

    rampup_begin_step: Size = 0
    """First step that compresses."""

    rampup_step: Count = 1
    """Steps over which the sparsities of the list are gone through."""

    sparsity: Annotated[list[Share], Field(min_length=1)] = [0.999]
    """Share of the entries that stay behind."""


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
    """1: optimizer state; 2: gradients too; 3: parameters too."""

    sharding_degree: Degree = -1
    """Ranks that share one copy; -1: all. The rest of the ranks hold further copies."""

    units: Names = []
    """Ours. Modules whose parameters are gathered together (stage 3); the model's direct children when empty."""

    optimize_offload: bool = False
    """Keep the shards in host memory."""

    mirror: Literal[0, 1] = 0
    """Ours. 1: each rank keeps the optimizer state of the next one too, so that nothing is lost with a rank
    (`phalanx run -n a:b`)."""

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
    """Stages of layers that pass micro-batches on."""

    accumulate_steps: Count = 1
    """Micro-batches of one step."""

    micro_batch_size: Count | None = None
    """Samples of a micro-batch. Left out: the batch split into `accumulate_steps`."""

    schedule_mode: Literal["1F1B", "F-then-B", "GPipe", "Interleaved", "ZeroBubble"] = "1F1B"
    """Order of the micro-batches. `F-then-B` is Fleet's word for GPipe."""

    cuts: Names = []
    """Ours. Modules at which a new stage begins; stages of about equal parameters when empty."""

    virtual: Count = 1
    """Ours. Stages held by each rank (Interleaved)."""

    p2p_cache_shape: bool | None = _no_effect("shapes are known before the first step")
    enable_partial_send_recv: bool | None = _no_effect("full activations are sent")


class TensorParallelConfigs(Configs):
    """Layers that are sharded over ranks."""

    tensor_parallel_degree: Count | None = None
    """Ranks that hold one copy of the layers together; `mp_degree` of `hybrid_configs` says the same."""

    tensor_init_seed: Annotated[int, Field(ge=-1)] | None = _no_effect(
        "shards are cut from the values the layer was made with"
    )


class ContextParallelConfigs(Configs):
    """Ours. Ranks that compute parts of the same sequences."""

    degree: Count | None = None
    """Ranks that compute a sequence together; `sep_degree` of `hybrid_configs` says the same."""

    attention: Literal["all_gather", "ring"] = "all_gather"
    """How attention meets the keys and values of other ranks. `all_gather`: each rank gathers all, and keeps them for
    the backward pass. `ring`: they go around the ranks in both passes, and no rank holds all of them."""


class ExpertParallelConfigs(Configs):
    """Ours. Ranks that hold the experts of a mixture together."""

    degree: Count | None = None
    """Ranks that hold one copy of the experts together; `ep_degree` of `hybrid_configs` says the same."""


class HybridConfigs(Configs):
    """The mesh: how many ranks each kind of parallelism has."""

    dp_degree: Degree = -1
    """Data-parallel replicas; -1 takes what the others leave."""

    mp_degree: Count | None = None
    """Ranks that hold one copy of the sharded layers, as `tensor_parallel_configs` says too."""

    pp_degree: Count | None = None
    """Stages of the pipeline."""

    sharding_degree: Count | None = None
    """Ranks that share one copy, as `sharding_configs` says too."""

    sep_degree: Count | None = None
    """Ranks that compute parts of the same sequences, as `context_parallel_configs` says too."""

    ep_degree: Count | None = None
    """Ranks that hold one copy of the experts together, as `expert_parallel_configs` says too; they read samples of
    their own, beside `dp_degree`."""

    order: list[Literal["dp", "pp", "sharding", "ep", "sep", "mp"]] = ["dp", "pp", "sharding", "ep", "sep", "mp"]
    """From the slowest axis to the fastest."""

    cp_degree: Count | None = _no_effect("sep_degree cuts sequences")
    moe_sharding_degree: Count | None = _no_effect("copies of experts are averaged over dp_degree")
    cp_sharding_degree: Count | None = _no_effect("sep_degree cuts sequences")
    enable_optimizer_timer: bool | None = _no_effect("the event file has the time of each step")
    split_norm_comm: bool | None = _no_effect("one all-reduce per group of ranks carries all norms")
    mp_configs: dict[str, Any] | None = _no_effect("tensor_parallel has no tuning switches")
    pp_configs: dict[str, Any] | None = _no_effect("the schedule decides")
    sharding_configs: dict[str, Any] | None = _no_effect("strategy.sharding_configs decides")


class ClipConfigs(Configs):
    """Ours. What gradients are held to before the update."""

    norm: Positive | None = None
    """Largest norm of all gradients together."""

    value: Positive | None = None
    """Largest absolute value of an entry."""


class EmaConfigs(Configs):
    """Ours. An exponential moving average of the parameters."""

    decay: Share = 0.999
    """Share of the average that each step keeps."""

    warmup: bool = True
    """True: the first means forget faster."""
