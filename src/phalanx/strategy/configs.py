"""The dictionaries of a strategy: their keys, types and bounds. Names and defaults are Fleet's; ours are marked.

Each holds what was said; a default is what a reader of the dictionary takes when the key is left out (`get`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

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

_STRICT = ConfigDict(extra="forbid", strict=True)


class ASyncConfigs(TypedDict, total=False):
    """How workers and parameter servers work together."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    k_steps: Annotated[int, Field(ge=-1)]
    """Above 0: geo mode, each worker trains a copy and sends its difference every so many steps. 0, -1 or left out: no
    geo."""

    max_merge_var_num: Count
    """Steps whose gradients a worker sends as one, in half-async mode."""

    half_async: bool
    """Ours. Half-async mode: a worker sends the sum of `max_merge_var_num` steps and waits until it is applied."""

    staleness: Count
    """Ours. Bounded staleness: no worker is more steps than this ahead of the slowest."""

    dense: Literal["server", "all_reduce"]
    """Ours. Where dense parameters live: on the servers like the rows, or on every worker, averaged each step
    (hybrid)."""

    local_optimizer: bool
    """Ours. Whether geo may train with another rule than SGD, whose state stays with each worker."""

    send_queue_size: Count
    min_send_grad_num_before_recv: Count
    thread_pool_size: Count
    send_wait_times: Count
    independent_recv_thread: bool
    launch_barrier: bool


class AmpConfigs(TypedDict, total=False):
    """Mixed precision."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    dtype: Literal["bfloat16", "float16"]
    """Ours. Type of the arithmetic; bfloat16, or float16 with `use_pure_fp16`."""

    use_pure_fp16: bool
    """Parameters in float16 too, with a float32 copy in the optimizer."""

    use_pure_bf16: bool
    """Parameters in bfloat16 too, with a float32 copy in the optimizer."""

    init_loss_scaling: Positive
    """32768. Loss scaling is used with float16 only."""

    incr_every_n_steps: Count
    """1000."""

    decr_every_n_nan_or_inf: Count
    """2."""

    incr_ratio: Annotated[Number, Field(ge=1)]
    """2.0."""

    decr_ratio: Annotated[Number, Field(gt=0, le=1)]
    """0.8."""

    use_dynamic_loss_scaling: bool
    """True."""

    custom_white_list: Names
    custom_black_list: Names
    custom_black_varnames: Names
    use_fp16_guard: bool
    use_optimizer_fp16: bool


class RecomputeConfigs(TypedDict, total=False):
    """Activation checkpointing: activations that are recomputed in the backward pass instead of kept."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    checkpoints: Names
    """Names of the modules, as `named_modules` says, or patterns of them; the model's direct children when empty."""

    enable_offload: bool
    """Keep the inputs of those modules in host memory instead of the device's."""

    selective: bool
    """Ours. Keep the results of matrix products and convolutions, compute the rest again."""

    checkpoint_shape: list[int]
    enable_tuning: bool
    refined_ops_patterns: list[Any]


class GradientMergeConfigs(TypedDict, total=False):
    """Micro-batches whose gradients make one update."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    k_steps: Count
    """1."""

    avg: bool
    """True: the mean of the micro-batches; False: their sum."""


class LocalSgdConfigs(TypedDict, total=False):
    """Ranks that take local steps and average their parameters."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    k_steps: Count
    """1. Steps between two averages."""

    begin_step: Count
    """1. First step in which ranks take local steps; before it, gradients are averaged as usual."""


class AdaptiveLocalSgdConfigs(TypedDict, total=False):
    """Ranks that take local steps; their number follows the loss."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    init_k_steps: Count
    """1. Steps between the first two averages."""

    begin_step: Count
    """1. First step in which ranks take local steps; before it, gradients are averaged as usual."""


class DgcConfigs(TypedDict, total=False):
    """Gradients of which only the largest entries are sent."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    rampup_begin_step: Size
    """0. First step that compresses."""

    rampup_step: Count
    """1. Steps over which the sparsities of the list are gone through."""

    sparsity: Annotated[list[Share], Field(min_length=1)]
    """[0.999]. Share of the entries that stay behind."""


class LarsConfigs(TypedDict, total=False):
    """Layer-wise rates for SGD with momentum."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    lars_coeff: Positive
    """0.001."""

    lars_weight_decay: NotNegative
    """0.0005."""

    epsilon: NotNegative
    """0."""

    exclude_from_weight_decay: Names
    """Parameters whose name contains one of these words are not decayed."""


class LambConfigs(TypedDict, total=False):
    """Layer-wise rates for Adam."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    lamb_weight_decay: NotNegative
    """0.01."""

    exclude_from_weight_decay: Names
    """Parameters whose name contains one of these words are not decayed."""


class ShardingConfigs(TypedDict, total=False):
    """Ranks that hold a part of optimizer state, gradients and parameters each (ZeRO)."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    stage: Literal[1, 2, 3]
    """1: optimizer state; 2: gradients too; 3: parameters too."""

    sharding_degree: Degree
    """Ranks that share one copy; all when left out. The rest of the ranks hold further copies."""

    units: Names
    """Ours. Modules whose parameters are gathered together (stage 3); the model's direct children when left out."""

    optimize_offload: bool
    """Keep the shards in host memory."""

    segment_strategy: str
    sharding_segment_strategy: str
    segment_broadcast_MB: Positive
    segment_anchors: Names
    mp_degree: Count
    dp_degree: Degree
    pp_degree: Count
    hybrid_dp: bool
    gradient_merge_acc_step: Count
    optimize_cast: bool
    pp_allreduce_in_optimize: bool
    enable_tuning: bool
    use_calc_stream: bool


class PipelineConfigs(TypedDict, total=False):
    """Stages of layers that pass micro-batches on."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    accumulate_steps: Count
    """1. Micro-batches of one step."""

    micro_batch_size: Count
    """Samples of a micro-batch; the batch split into `accumulate_steps` when left out."""

    schedule_mode: Literal["1F1B", "F-then-B", "GPipe", "Interleaved", "ZeroBubble"]
    """1F1B. `F-then-B` is Fleet's word for GPipe."""

    cuts: Names
    """Ours. Modules at which a new stage begins; cut into stages of about equal parameters when left out."""

    virtual: Count
    """Ours. Stages held by each rank (Interleaved); 1."""

    p2p_cache_shape: bool
    enable_partial_send_recv: bool


class TensorParallelConfigs(TypedDict, total=False):
    """Layers that are sharded over ranks."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    tensor_parallel_degree: Count
    """1. Ranks that hold one copy of the layers together."""

    tensor_init_seed: Annotated[int, Field(ge=-1)]


class ContextParallelConfigs(TypedDict, total=False):
    """Ours. Ranks that compute parts of the same sequences."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    degree: Count
    """Ranks that compute a sequence together; `sep_degree` of `hybrid_configs` says the same."""


class HybridConfigs(TypedDict, total=False):
    """The mesh: how many ranks each kind of parallelism has."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    dp_degree: Degree
    """Data-parallel replicas; -1 takes what the others leave."""

    mp_degree: Count
    pp_degree: Count
    sharding_degree: Count
    sep_degree: Count
    """Ranks that compute parts of the same sequences, as `context_parallel_configs` says too."""

    order: list[Literal["dp", "pp", "sharding", "sep", "mp"]]
    """["dp", "pp", "sharding", "sep", "mp"]: from the slowest axis to the fastest."""

    ep_degree: Count
    cp_degree: Count
    moe_sharding_degree: Count
    cp_sharding_degree: Count
    enable_optimizer_timer: bool
    split_norm_comm: bool
    mp_configs: dict[str, Any]
    pp_configs: dict[str, Any]
    sharding_configs: dict[str, Any]


class ClipConfigs(TypedDict, total=False):
    """Ours. What gradients are held to before the update."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    norm: Positive
    """Largest norm of all gradients together."""

    value: Positive
    """Largest absolute value of an entry."""


class EmaConfigs(TypedDict, total=False):
    """Ours. An exponential moving average of the parameters."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]

    decay: Share
    """0.999."""

    warmup: bool
    """True: the first means forget faster."""
