"""`DistributedStrategy`: the settings of distributed training, validated on assignment."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.errors import StrategyError, StrategyTypeError, did_you_mean
from phalanx.strategy import configs
from phalanx.strategy.checks import check_together, idle_settings
from phalanx.strategy.configs import AmpConfigs, Configs, HybridConfigs, KeysOf
from phalanx.strategy.files import read_settings, write_settings
from phalanx.strategy.menu import INSTEAD, NEEDS, NOT_YET, RENAMED
from phalanx.strategy.table import printed, strategy_table
from phalanx.strategy.techniques import TECHNIQUES

if TYPE_CHECKING:
    from rich.console import RenderableType

logger = logging.getLogger("phalanx.strategy")

ConfigsT = TypeVar("ConfigsT", bound=Configs)


class DistributedStrategy(BaseModel):
    """Settings of a distributed job. Every field has a working default; an unknown or wrong one is an error at once."""

    model_config = ConfigDict(validate_assignment=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    graph: bool = False
    """Compile the forward pass (`torch.compile`); in `px.train_step` the loss and the update too."""

    fuse_all_reduce_ops: bool = True
    """Group gradients in buckets, with one all-reduce per bucket. When False: one all-reduce per gradient."""

    fuse_grad_size_in_MB: configs.Positive = 25.0  # noqa: N815 (Fleet's spelling)
    """MiB of gradients in a bucket. Fleet's default is 32; ours is torch DDP's."""

    fuse_grad_size_in_TFLOPS: configs.Positive | None = None  # noqa: N815
    """Accepted, has no effect (logged): the size of buckets is set in bytes only."""

    sync_nccl_allreduce: bool = True
    """False is accepted, has no effect (logged): collectives are always waited for before the optimizer step."""

    find_unused_parameters: bool = False
    """Accepted, has no effect: parameters without a gradient are found in every step, and logged after the first."""

    gradient_scale_configs: dict[Literal["scale_strategy"], Literal["avg", "sum"]] = {}
    """`{"scale_strategy": "avg" | "sum"}`: whether gradients are averaged over the ranks or summed."""

    parameter_broadcast: bool = True
    """Start every rank from rank 0's parameters and buffers."""

    sync_buffers: bool = True
    """Keep floating-point buffers equal: batch-norm statistics are averaged with the gradients, others are rank 0's."""

    logical_replicas: int | None = Field(default=None, ge=0)
    """Split every global batch over this number of logical replicas, and distribute them to the ranks. The trained
    weights are bit for bit the same on any number of ranks up to this number. None: one replica for each rank; if a
    checkpoint is loaded on fewer ranks, it keeps the number of replicas that it was trained with. 0: one replica for
    each rank, also after such a load."""

    balance: Literal["replicas", "samples"] | None = None
    """Load balancing: measure how fast each rank computes, and give faster ranks more logical replicas (`replicas`), or
    more samples of each global batch (`samples`). The global batch keeps its size. None: equal parts."""

    replica_threads: int = Field(default=1, gt=0)
    """Threads that compute a logical replica on a CPU; another number of threads changes the last bits of the
    results."""

    check_nan_inf: bool = False
    """Test gradients and loss of every step, and name where NaN or infinity first appeared: module, operator, rank and
    sample."""

    audit: float = Field(default=0.0, ge=0.0, le=1.0)
    """Fraction of the updates in which another rank computes a random logical replica again; its gradients must be bit
    for bit the same. Finds silent data corruption; needs `logical_replicas` on several ranks."""

    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by (global batch / base_batch), or by its square root, and warm up."""

    base_batch: int | None = Field(default=None, gt=0)
    """Global batch for which the learning rate was chosen; the per-rank batch when None."""

    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps over which the learning rate rises linearly to its value. None: 5 epochs if `scale_lr` is set
    (500 steps if the length of an epoch is not known), otherwise 0."""

    a_sync: bool | None = None
    """Parameter servers: True for asynchronous training, False for synchronous. None: asynchronous if the job has
    servers."""

    a_sync_configs: Annotated[dict[str, Any], KeysOf(configs.ASyncConfigs)] = {}
    """`{"k_steps": 100}` and the like: see `ASyncConfigs`."""

    amp: bool = False
    """Mixed precision: forward pass and loss compute in bfloat16 (float16 if `amp_configs` says so)."""

    amp_configs: Annotated[dict[str, Any], KeysOf(configs.AmpConfigs)] = {}

    recompute: bool = False
    """Activation checkpointing: recompute named modules in the backward pass instead of keeping their activations."""

    recompute_configs: Annotated[dict[str, Any], KeysOf(configs.RecomputeConfigs)] = {}

    out_of_memory: Literal["recompute", "raise"] = "recompute"
    """What a rank does when it runs out of memory in a forward or backward pass, in a cross entropy, or at the
    optimizer's first step. `recompute`: free memory, recompute activations from then on, and repeat the failed pass.
    `raise`: raise the error."""

    gradient_merge: bool = False
    """Accumulate the gradients of `k_steps` batches before one update."""

    gradient_merge_configs: Annotated[dict[str, Any], KeysOf(configs.GradientMergeConfigs)] = {}

    localsgd: bool = False
    """Let ranks take local steps and average their parameters every `k_steps` steps."""

    localsgd_configs: Annotated[dict[str, Any], KeysOf(configs.LocalSgdConfigs)] = {}

    adaptive_localsgd: bool = False
    """Like `localsgd`, with a number of local steps that is chosen from the loss."""

    adaptive_localsgd_configs: Annotated[dict[str, Any], KeysOf(configs.AdaptiveLocalSgdConfigs)] = {}

    dgc: bool = False
    """Send only the largest entries of each gradient; each rank adds the rest to its next gradient. For SGD with
    momentum."""

    dgc_configs: Annotated[dict[str, Any], KeysOf(configs.DgcConfigs)] = {}

    lars: bool = False
    """Scale the learning rate of each parameter of an SGD optimizer by the norms of its weights and gradients."""

    lars_configs: Annotated[dict[str, Any], KeysOf(configs.LarsConfigs)] = {}

    lamb: bool = False
    """Like `lars`, for Adam."""

    lamb_configs: Annotated[dict[str, Any], KeysOf(configs.LambConfigs)] = {}

    fp16_allreduce: bool = False
    """Send gradients in float16."""

    use_hierarchical_allreduce: bool = False
    """Reduce gradients within each host first, then between hosts."""

    hierarchical_allreduce_inter_nranks: int = Field(default=1, ge=1)
    """Number of ranks on one host. 1: taken from the job."""

    sync_batch_norm: bool = False
    """Normalise over the samples of all ranks."""

    sharding: bool = False
    """Let each rank hold a part of optimizer state, gradients and parameters (ZeRO)."""

    sharding_configs: Annotated[dict[str, Any], KeysOf(configs.ShardingConfigs)] = {}

    pipeline: bool = False
    """Split the model into stages, which pass micro-batches from one to the next."""

    pipeline_configs: Annotated[dict[str, Any], KeysOf(configs.PipelineConfigs)] = {}

    tensor_parallel: bool = False
    """Shard the layers that `px.shard` names over ranks."""

    tensor_parallel_configs: Annotated[dict[str, Any], KeysOf(configs.TensorParallelConfigs)] = {}

    context_parallel: bool = False
    """Let ranks compute parts of the same sequences in the modules that `px.shard` gives style `context`."""

    context_parallel_configs: Annotated[dict[str, Any], KeysOf(configs.ContextParallelConfigs)] = {}

    expert_parallel: bool = False
    """Distribute the experts of the modules that `px.shard` gives style `expert` over ranks; tokens are sent to the
    ranks of their experts."""

    expert_parallel_configs: Annotated[dict[str, Any], KeysOf(configs.ExpertParallelConfigs)] = {}

    hybrid_configs: Annotated[dict[str, Any], KeysOf(configs.HybridConfigs)] = {}
    """The mesh: how many ranks each kind of parallelism has."""

    clip: bool = False
    """Clip gradients over all ranks before the update, as `clip_configs` says."""

    clip_configs: Annotated[dict[str, Any], KeysOf(configs.ClipConfigs)] = {}

    ema: bool = False
    """Keep an exponential moving average of the parameters."""

    ema_configs: Annotated[dict[str, Any], KeysOf(configs.EmaConfigs)] = {}

    def __init__(self, /, **settings: Any) -> None:
        for name in settings:
            _refuse_unknown(name)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _strategy_error(error) from None
        check_together(self)
        for name in settings:
            self._warn_without_effect(name)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_unknown(name)
        self._set(name, value)
        self._warn_without_effect(name)

    def _set(self, name: str, value: Any) -> None:
        before = getattr(self, name)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise _strategy_error(error, name) from None
        try:
            check_together(self)
        except StrategyError:
            super().__setattr__(name, before)
            raise

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            _refuse_unknown(name)
        return super().__getattr__(name)  # type: ignore[misc]

    @property
    def techniques(self) -> set[str]:
        """Names of the switches that are on; a degree above 1 turns its technique on too."""
        degrees = {
            "pp": "pipeline",
            "sharding": "sharding",
            "ep": "expert_parallel",
            "sep": "context_parallel",
            "mp": "tensor_parallel",
        }
        hybrid = self.config(HybridConfigs)
        by_degree = {degrees[kind] for kind in degrees if getattr(hybrid, f"{kind}_degree") not in (None, 1)}
        return by_degree | {name for name in TECHNIQUES if getattr(self, name)}

    @property
    def amp_dtype(self) -> Literal["bfloat16", "float16"]:
        """Dtype of the arithmetic under `amp`."""
        amp = self.config(AmpConfigs)
        return amp.dtype or ("float16" if amp.use_pure_fp16 else "bfloat16")

    def config(self, kind: type[ConfigsT]) -> ConfigsT:
        """Return the dictionary of this kind, with defaults for the keys that were left out."""
        return kind.model_construct(**getattr(self, _DICTIONARIES[kind]))

    def explicit_settings(self) -> dict[str, Any]:
        """Return the settings that were set, by name, in the order of the menu."""
        return {
            name: value
            for name, value in self.model_dump(mode="json").items()
            if name in self.model_fields_set and value is not None
        }

    def idle(self) -> list[str]:
        """Return a sentence for every setting that would not act beside the others."""
        return idle_settings(self)

    def save(self, path: str | Path) -> None:
        """Write what was set to a file: YAML (`.yaml`, `.yml`) or TOML (`.toml`), by its suffix.

        Raises:
            StrategyError: If the suffix is another.
        """
        write_settings(path, self.explicit_settings())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a strategy from a YAML or TOML file.

        Raises:
            StrategyError: If the file cannot be read, or says something that a strategy does not know or take; names
                the file and the setting.
        """
        settings = read_settings(path)
        try:
            return cls(**settings)
        except StrategyError as error:
            raise type(error)(f"{path}: {error}") from None

    def __str__(self) -> str:
        return printed(self)

    def __rich__(self) -> RenderableType:
        return strategy_table(self)

    @property
    def gradient_scale(self) -> Literal["avg", "sum"]:
        """How gradients of different ranks combine."""
        return self.gradient_scale_configs.get("scale_strategy", "avg")

    def _warn_without_effect(self, name: str) -> None:
        if name == "fuse_grad_size_in_TFLOPS":
            logger.warning("fuse_grad_size_in_TFLOPS has no effect: fuse_grad_size_in_MB sets the size of buckets.")
        if name == "sync_nccl_allreduce" and not self.sync_nccl_allreduce:
            logger.warning("sync_nccl_allreduce=False has no effect: gradients are complete before the optimizer step.")
        if name.endswith("_configs"):
            _say_which_keys_do_not_act(name, getattr(self, name))


def check_strategy(strategy: object) -> DistributedStrategy:
    """Return the strategy, or the default one for None; what was put into its dictionaries since is checked too.

    Raises:
        StrategyTypeError: If it is anything else; names the type.
        StrategyError: If a dictionary holds what it does not know or take.
    """
    if strategy is None:
        return DistributedStrategy()
    if not isinstance(strategy, DistributedStrategy):
        kind = type(strategy)
        raise StrategyTypeError(
            f"strategy must be a phalanx DistributedStrategy, found {kind.__module__}.{kind.__qualname__}. "
            "Make one with fleet.DistributedStrategy() and set its fields."
        )
    for name in DistributedStrategy.model_fields:
        if name.endswith("_configs") and getattr(strategy, name):
            strategy._set(name, getattr(strategy, name))
    return strategy


def configs_of(dictionary: str) -> type[Configs] | None:
    """Return the class with the keys of a dictionary; None for other settings."""
    field = DistributedStrategy.model_fields.get(dictionary)
    return next((part.configs for part in field.metadata if isinstance(part, KeysOf)), None) if field else None


_DICTIONARIES = {kind: name for name in DistributedStrategy.model_fields if (kind := configs_of(name)) is not None}
"""Name of the setting that holds the dictionary of each kind."""


def _say_which_keys_do_not_act(dictionary: str, keys: dict[str, Any]) -> None:
    kind = configs_of(dictionary)
    reasons = {} if kind is None else kind.keys_without_effect()
    reasons |= {
        key: f"it needs {other}"
        for (of, key), other in NEEDS.items()
        if of == dictionary and not keys.get(other, 0) > 0
    }
    for key, why in reasons.items():
        if key in keys:
            logger.warning("%s[%r] has no effect: %s.", dictionary, key, why)


def _refuse_unknown(name: str) -> None:
    if name in DistributedStrategy.model_fields or hasattr(DistributedStrategy, name):
        return
    if name in RENAMED:
        raise StrategyError(f"strategy.{name} was renamed: use strategy.{RENAMED[name]}.")
    if name in INSTEAD:
        raise StrategyError(f"strategy.{name} is no setting: {INSTEAD[name]}.")
    if name in NOT_YET:
        raise StrategyError(f"strategy.{name} is not available in this version; remove it. Nothing would act on it.")
    names = [*DistributedStrategy.model_fields, *INSTEAD, *NOT_YET]
    raise StrategyError(f"DistributedStrategy has no setting '{name}'.{did_you_mean(name, names)}")


def _strategy_error(error: ValidationError, name: str | None = None) -> StrategyError:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or name or "strategy"
    dictionary = str(first["loc"][0]) if first["loc"] else where
    kind_of_keys = configs_of(dictionary)
    keys = [] if kind_of_keys is None else list(kind_of_keys.model_fields)
    if first["type"] == "extra_forbidden" and keys:
        unknown = str(first["loc"][1])
        return StrategyError(
            f"strategy.{dictionary} has no setting '{unknown}'.{did_you_mean(unknown, keys) or f' It knows: {keys}.'}"
        )
    kind = StrategyTypeError if first["type"].endswith("_type") else StrategyError
    example = f' Write {{"{keys[0]}": ...}}, or such.' if keys and where == dictionary else ""
    return kind(
        f"strategy.{where}: {first['msg']}; found {first['input']!r} ({type(first['input']).__name__}).{example}"
    )
