"""`DistributedStrategy`: what the user asks for, with Fleet's names; rules turn it into a Plan (`plan/rules`)."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from phalanx.errors import StrategyError, StrategyTypeError, did_you_mean

logger = logging.getLogger("phalanx.strategy")

RENAMED = {
    "exec_strategy": "execution_strategy",
    "forward_recompute": "recompute",
    "recompute_checkpoints": 'recompute_configs = {"checkpoints": [...]}',
    "use_local_sgd": "localsgd",
}
"""Settings of older Fleet releases, and what replaced them."""

NOT_YET = frozenset(
    (
        "adaptive_localsgd",
        "adaptive_localsgd_configs",
        "amp",
        "amp_configs",
        "asp",
        "auto",
        "auto_search",
        "build_strategy",
        "dgc",
        "dgc_configs",
        "elastic",
        "execution_strategy",
        "fp16_allreduce",
        "gradient_merge",
        "gradient_merge_configs",
        "hierarchical_allreduce_inter_nranks",
        "hybrid_configs",
        "lamb",
        "lamb_configs",
        "lars",
        "lars_configs",
        "localsgd",
        "localsgd_configs",
        "pipeline",
        "pipeline_configs",
        "qat",
        "qat_configs",
        "recompute",
        "recompute_configs",
        "semi_auto",
        "sharding",
        "sharding_configs",
        "sync_batch_norm",
        "tensor_parallel",
        "tensor_parallel_configs",
        "use_hierarchical_allreduce",
    )
)
"""Fleet settings this version knows by name and refuses, because it would not act on them."""


Count = Annotated[int, Field(ge=1)]

WITHOUT_EFFECT = {
    "send_queue_size": "queues to the servers are bounded by bytes",
    "min_send_grad_num_before_recv": "rows are read when a forward pass asks for them",
    "thread_pool_size": "one connection per server carries all tables",
    "send_wait_times": "nothing waits for more gradients to come",
    "independent_recv_thread": "rows are read when a forward pass asks for them",
    "launch_barrier": "workers wait for servers and each other whenever they need to",
}
"""Settings of `a_sync_configs` that are accepted and do not act, and why."""


class ASyncConfigs(TypedDict, total=False):
    """How workers and parameter servers work together; Fleet's names, and four of our own."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    k_steps: Annotated[int, Field(ge=-1)]
    """Above 0: geo mode, each worker trains a copy and sends its difference every so many steps. 0, -1 or left out: no
    geo."""

    max_merge_var_num: Count
    """Steps whose gradients a worker sends as one, in half-async mode."""

    half_async: bool
    """Half-async mode: a worker sends the sum of `max_merge_var_num` steps and waits until it is applied."""

    staleness: Count
    """Bounded staleness: no worker is more steps than this ahead of the slowest."""

    dense: Literal["server", "all_reduce"]
    """Where dense parameters live: on the servers like the rows, or on every worker, averaged each step (hybrid)."""

    local_optimizer: bool
    """Whether geo may train with another rule than SGD, whose state stays with each worker."""

    send_queue_size: Count
    min_send_grad_num_before_recv: Count
    thread_pool_size: Count
    send_wait_times: Count
    independent_recv_thread: bool
    launch_barrier: bool


class DistributedStrategy(BaseModel):
    """Settings of a distributed job. Every field has a working default; an unknown or wrong one is an error at once."""

    model_config = ConfigDict(validate_assignment=True, extra="forbid", strict=True)

    graph: bool = False
    """Compile the forward pass and the loss (`torch.compile`)."""

    fuse_all_reduce_ops: bool = True
    """Let gradients travel together; one all-reduce per gradient when False."""

    fuse_grad_size_in_MB: float = Field(default=25.0, gt=0, strict=False)  # noqa: N815 (Fleet's spelling)
    """MiB of gradients that travel together. Fleet's default is 32; ours is torch DDP's."""

    fuse_grad_size_in_TFLOPS: float | None = Field(default=None, gt=0, strict=False)  # noqa: N815
    """Accepted and reported: buckets are cut by bytes only."""

    sync_nccl_allreduce: bool = True
    """Accepted and reported: collectives are always waited for before the optimizer step."""

    find_unused_parameters: bool = False
    """Accepted: parameters without a gradient are always found, on every step, and named after the first."""

    gradient_scale_configs: dict[Literal["scale_strategy"], Literal["avg", "sum"]] = Field(default_factory=dict)
    """`{"scale_strategy": "avg" | "sum"}`: whether gradients are averaged over the ranks or summed."""

    parameter_broadcast: bool = True
    """Start every rank from rank 0's parameters and buffers."""

    sync_buffers: bool = True
    """Keep floating-point buffers equal: batch-norm statistics are averaged with the gradients, others are rank 0's."""

    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by (global batch / base_batch), or by its square root, and warm up."""

    base_batch: int | None = Field(default=None, gt=0)
    """Global batch for which the learning rate was chosen; the per-rank batch when None."""

    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps over which the learning rate rises linearly to its value; when None, 5 epochs for a scaled
    rate (500 steps where the length of an epoch is not known) and 0 otherwise."""

    a_sync: bool | None = None
    """Parameter servers: True for asynchronous training, False for synchronous; asynchronous when None and the job has
    servers."""

    a_sync_configs: ASyncConfigs = Field(default_factory=ASyncConfigs)
    """`{"k_steps": 100}` and the like: see `ASyncConfigs`."""

    def __init__(self, **settings: Any) -> None:
        for name in settings:
            _refuse_unknown(name)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _translated(error) from None
        self._check_servers()

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_unknown(name)
        before = getattr(self, name)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise _translated(error, name) from None
        try:
            self._check_servers()
        except StrategyError:
            super().__setattr__(name, before)
            raise
        if name == "fuse_grad_size_in_TFLOPS":
            logger.warning("fuse_grad_size_in_TFLOPS does not act: buckets are cut by bytes; set fuse_grad_size_in_MB.")
        if name == "sync_nccl_allreduce" and not value:
            logger.warning("sync_nccl_allreduce=False does not act: gradients are complete before the optimizer step.")
        if name == "a_sync_configs":
            _say_what_does_not_act(self.a_sync_configs)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            _refuse_unknown(name)
        return super().__getattr__(name)  # type: ignore[misc]

    def _check_servers(self) -> None:
        """Raise if the settings of parameter servers ask for two modes at once."""
        configs = self.a_sync_configs
        asked = [f"{name}={configs[name]}" for name in ("k_steps", "half_async", "staleness") if _is_on(configs, name)]
        if len(asked) > 1:
            raise StrategyError(f"strategy.a_sync_configs asks for several modes: {', '.join(asked)}. Keep one.")
        if asked and self.a_sync is False:
            raise StrategyError(
                f"strategy.a_sync=False asks for synchronous training, and a_sync_configs for {asked[0]}. Set "
                "a_sync=True, or leave it out of a_sync_configs."
            )

    @property
    def gradient_scale(self) -> Literal["avg", "sum"]:
        """How gradients of different ranks combine."""
        return self.gradient_scale_configs.get("scale_strategy", "avg")


def check_strategy(strategy: object) -> DistributedStrategy:
    """Return the strategy, or the default one for None.

    Raises:
        StrategyTypeError: If it is anything else; names the type.
    """
    if strategy is None:
        return DistributedStrategy()
    if not isinstance(strategy, DistributedStrategy):
        kind = type(strategy)
        raise StrategyTypeError(
            f"strategy must be a phalanx DistributedStrategy, found {kind.__module__}.{kind.__qualname__}. "
            "Make one with fleet.DistributedStrategy() and set its fields."
        )
    return strategy


def _say_what_does_not_act(configs: ASyncConfigs) -> None:
    needs = {"max_merge_var_num": "half_async", "local_optimizer": "k_steps"}
    without = {name: f"it needs {mode}" for name, mode in needs.items() if not _is_on(configs, mode)}
    for name, why in (WITHOUT_EFFECT | without).items():
        if name in configs:
            logger.warning("a_sync_configs[%r] does not act: %s.", name, why)


def _is_on(configs: ASyncConfigs, name: str) -> bool:
    value: Any = configs.get(name, 0)
    return bool(value > 0)


def _refuse_unknown(name: str) -> None:
    if name in DistributedStrategy.model_fields or name == "gradient_scale":
        return
    if name in RENAMED:
        raise StrategyError(f"strategy.{name} was renamed: use strategy.{RENAMED[name]}.")
    if name in NOT_YET:
        raise StrategyError(f"strategy.{name} is not available in this version; remove it. Nothing would act on it.")
    known = [*DistributedStrategy.model_fields, *NOT_YET]
    raise StrategyError(f"DistributedStrategy has no setting '{name}'.{did_you_mean(name, known)}")


def _translated(error: ValidationError, name: str | None = None) -> StrategyError:
    first = error.errors()[0]
    if first["type"] == "extra_forbidden" and first["loc"][0] == "a_sync_configs":
        unknown = str(first["loc"][1])
        hint = did_you_mean(unknown, ASyncConfigs.__annotations__)
        return StrategyError(f"strategy.a_sync_configs has no setting '{unknown}'.{hint}")
    where = ".".join(map(str, first["loc"])) or name or "strategy"
    kind = StrategyTypeError if first["type"].endswith("_type") else StrategyError
    example = ' Write {"k_steps": 100}, or such.' if where == "a_sync_configs" else ""
    return kind(
        f"strategy.{where}: {first['msg']}; found {first['input']!r} ({type(first['input']).__name__}).{example}"
    )
