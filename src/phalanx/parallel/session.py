"""`TrainingSession`: the distributed models and optimizers of this process, and their settings.

The only state of `phalanx.parallel` between two calls. It holds values that others fill in and imports nothing of the
package, so that every module may ask it. Records live as long as their model or optimizer; none refers to it strongly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from phalanx.data.loader.loader import ShardedLoader
    from phalanx.parallel.balance.load_balance import LoadBalance
    from phalanx.parallel.checks.misuse import ForwardWatch
    from phalanx.parallel.checks.replica_check import ReplicaComparison
    from phalanx.parallel.checks.step_check import StepWatch
    from phalanx.parallel.data.reducer import Reducer
    from phalanx.parallel.elastic.sharded_state import ShardedState
    from phalanx.parallel.memory.guard.guard import MemoryGuard
    from phalanx.parallel.numerics.audit import Audit
    from phalanx.parallel.optim.ema import EMA
    from phalanx.parallel.optim.gradient_accumulation import GradientAccumulation
    from phalanx.parallel.pipeline.engine import PipelineEngine
    from phalanx.parallel.stateful import SavedState
    from phalanx.parallel.tensor.shard_api import ShardRequest
    from phalanx.parallel.update.updaters import Updater
    from phalanx.plan.shape import ModelShape
    from phalanx.plan.value import Plan
    from phalanx.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True)
class Applied:
    """What `apply` made of one model."""

    plan: Plan
    shape: ModelShape
    reducer: Reducer | None
    """None with one rank, and when no gradient is reduced over the ranks."""

    is_sharded: bool = False
    """Whether each rank holds only a shard of its parameters."""

    updaters: tuple[Updater, ...] = ()
    """What acts around the steps of its optimizers."""

    pipeline: PipelineEngine | None = None
    """This rank's stages of it, if it is split into stages."""

    drift: ReplicaComparison | None = None
    """Compares the replicas of its parameters, if there are any and the comparison is on."""

    mirror: int | None = None
    """Mirrors of each shard of optimizer state, where ranks that may leave and join keep it in shards."""


Closure = Callable[[], Any]
PlanCheck = Callable[["Plan"], str | None]
"""Returns why a Plan's operators are not those of a captured step; None if they are."""


@dataclass(slots=True)
class ModelRecord:
    """What is known of one model, distributed or about to be."""

    applied: Applied | None = None
    shard_requests: list[ShardRequest] = field(default_factory=list)
    """What `px.shard` was called with."""

    captured_step: PlanCheck | None = None
    """Compares Plans with the step that was captured last; a Plan that places single operators fits one step only."""

    average: EMA | None = None
    """The average of its weights that `strategy.ema` keeps."""

    saved_state: dict[str, SavedState] = field(default_factory=dict)
    """State beside the model's own that checkpoints hold, by name."""

    memory_guard: MemoryGuard | None = None
    """Repeats its passes that run out of memory, if that can be done."""

    audit: Audit | None = None
    """Lets other ranks compute replicas of its gradients again, now and then."""

    forward_watch: ForwardWatch | None = None
    expects_optimizer: bool = False
    """Whether its optimizer should come by a call of its own."""


class StepPhase(IntEnum):
    """What may happen at `optimizer.step()`, in this order, whatever the order of the calls that asked for it.

    Before all of it, a step that torch's GradScaler makes is unscaled, or left out.
    """

    WAIT_FOR_REPLICAS = auto()
    """Leave the update out until this rank's last logical replica has made its pass."""

    ACCUMULATE_GRADIENTS = auto()
    """Leave the update out until the gradients of all batches are there."""

    SKIP_OVERFLOW = auto()
    """Leave the update out when a scaled gradient is not finite on some rank."""

    BEGIN_UPDATE = auto()
    """Note that the update begins, where its seconds are measured."""

    CHECK_PARAMETERS = auto()
    RESERVE_MEMORY = auto()
    """Find the memory that the update is going to take, while nothing is changed."""

    SCALE_LEARNING_RATE = auto()
    PUSH_TABLES = auto()
    """Push gradients to tables, with the learning rate of this step."""

    SPLIT_GROUPS = auto()
    """Split parameter groups into what torch's fused loops take together."""

    USE_MASTER_WEIGHTS = auto()
    """Put float32 weights and gradients in the place of low-precision ones."""

    UNSCALE_GRADIENTS = auto()
    EXCHANGE_GRADIENTS = auto()
    """Exchange the largest entries of gradients (dgc)."""

    CLIP_GRADIENTS = auto()
    PUT_SLICES = auto()
    """Put this rank's shards in the place of whole parameters, where ranks that may leave shard optimizer state."""

    UPDATE = auto()
    """The optimizer's own rule, or LARS or LAMB."""

    SHARE_PARAMETERS = auto()
    """Put whole parameters back, and take over what the other ranks updated."""

    RESTORE_LEARNING_RATE = auto()
    PULL_TABLES = auto()
    JOIN_GROUPS = auto()
    ROUND_MASTER_WEIGHTS = auto()
    RESTORE_MOMENTUM = auto()
    """Give the optimizer its momentum back, which was applied before the exchange (dgc)."""

    AVERAGE_PARAMETERS = auto()
    """Average parameters over the ranks (local SGD)."""

    COMPARE_REPLICAS = auto()
    MOVE_AVERAGES = auto()
    """Move the exponential moving averages of the weights."""

    BALANCE_LOAD = auto()
    """Give faster ranks more logical replicas or samples, now and then."""

    @property
    def decides(self) -> bool:
        """Whether actions of this phase decide if there is an update."""
        return self <= StepPhase.SKIP_OVERFLOW


@dataclass(frozen=True, slots=True)
class StepAction:
    """One action at every step of an optimizer."""

    phase: StepPhase
    run: Callable[[Optimizer], bool | None]
    needs_gradients: bool
    """Whether it acts on gradients before the update, which a closure has not computed yet."""


@dataclass(slots=True)
class OptimizerRecord:
    """What acts at the steps of one optimizer."""

    is_distributed: bool = False
    """Whether it was given to `px.distribute`, `px.Model` or `fleet.distributed_optimizer`."""

    actions: list[StepAction] = field(default_factory=list)
    """What its steps do beside the update, sorted by phase."""

    gates: tuple[Callable[[Optimizer], bool | None], ...] = ()
    """Those of the actions that decide."""

    hook_handles: tuple[RemovableHandle, ...] = ()
    """Torch's, of the actions that run in its hooks."""

    update: Callable[..., Any] | None = None
    """What `step` does once nothing holds it back; None while `step` is torch's own."""

    is_own_rule: bool = False
    """Whether `update` is a rule of ours."""

    wrap_closure: Callable[[Closure], Closure] | None = None
    updates: int = 0
    """Updates that it has made here."""

    given_before: tuple[int, int] = (0, 0)
    """Batches to train on, and passes over loaders of such, before it was distributed."""

    has_closure: bool = False
    """Whether its last step was given a closure."""

    has_updated: bool = True
    """Whether the last step updated."""

    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    """Distributed models that it trains."""

    saved_state: dict[str, SavedState] = field(default_factory=dict)
    """State beside the optimizer's own that checkpoints hold, by name."""

    scaler_refusal: str | None = None
    """Why torch's GradScaler cannot take its steps."""

    shards: ShardedState | None = None
    """The shards of its state that this rank keeps, where ranks may leave and join."""

    watch: StepWatch | None = None
    """Checks the steps of an optimizer that was not distributed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """What a script is about to train."""

    model: nn.Module
    optimizer: Optimizer | None = None
    strategy: DistributedStrategy | None = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    has_target: bool | None = None
    """Whether a column of the data is its target; None where the script's own loop decides."""

    return_outputs: bool = True
    """Whether its loop may keep what the model returns."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What it called the model with, where it passed no data."""


@dataclass(slots=True)
class TrainingSession:
    """The state of this process. Fleet's calls bring its parts one by one, in any order."""

    models: weakref.WeakKeyDictionary[nn.Module, ModelRecord] = field(default_factory=weakref.WeakKeyDictionary)
    """Distributed ones in the order in which they were distributed."""

    optimizers: weakref.WeakKeyDictionary[Optimizer, OptimizerRecord] = field(default_factory=weakref.WeakKeyDictionary)
    parameters: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """Every parameter of a distributed model, by identity: its name, and whether it was trainable then."""

    replacements: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """Parameters that sharding or a pipeline replaced: the new one, and its name."""

    shard_groups: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """The ranks over which a layer of ours shards a parameter."""

    shards: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """How a layer of ours sharded a parameter: the dim, and the slices of all ranks."""

    stage_groups: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """The ranks over which the model of a parameter is split into stages."""

    accumulations: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """Parameters whose gradients accumulate over several batches: a weak reference to what counts them."""

    loss_scaled: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """Parameters of optimizers with a loss scale: the hook that unscales their gradients, if one does."""

    gradient_factors: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """By how much gradients are too large now; only of parameters whose gradients stay scaled until the update."""

    is_in_table: Callable[[Tensor], bool] | None = None
    """Returns whether the gradient of a parameter goes to a table; None in a job without tables."""

    strategy: DistributedStrategy | None = None
    initial_strategy: DistributedStrategy | None = None
    """What `fleet.init` was given: the strategy of models for which no other is set."""

    balance: LoadBalance | None = None
    """Gives faster ranks more of each global batch, where the Plan asks for it."""

    balanced: Callable[[], Optimizer | None] = lambda: None
    """Returns the optimizer whose updates it counts, while that lives."""

    loader: ShardedLoader | None = None
    planner: Callable[[TrainingRequest], NoReturn] | None = None
    """In a run that only plans, called in place of training."""

    on_bucket: Callable[[int, Sequence[str], Tensor], None] | None = None
    """Called with the place, the names and the values of a bucket of gradients before they are added up."""

    on_overflow: Callable[[Optimizer, float | None], None] | None = None
    """Called where a step is left out because a scaled gradient is not finite, with the scale; None for that of
    torch's GradScaler."""

    is_trial: bool = False
    """Whether optimizers step that train nothing of the script's, to see what they do."""

    has_label_weights: bool | Tensor = False
    """Whether a loss was a mean over what counts on all ranks, and not the mean over samples too."""

    has_means_in_loop: bool = False
    """Whether the script averaged over the ranks within a loop over batches to train on (`px.global_mean`)."""

    has_norms_of_shards: bool = False
    """Whether norms of parameters were computed that torch shards."""

    loaded_obstacle: str | None = None
    """Why the run that saved the checkpoint which was loaded cannot be continued as replicas."""

    has_compared_data: bool = False
    has_named_old_words: bool = False

    def reset(self) -> None:
        """Forget everything, as in a new process."""
        self.__init__()  # type: ignore[misc]


session = TrainingSession()
"""This process's own."""


def leave_out_step(optimizer: Optimizer, scale: float | None) -> None:
    """Note that a step is left out because a scaled gradient is not finite.

    Args:
        optimizer: Whose step it is.
        scale: By how much its loss was made larger; None where torch's GradScaler knows.
    """
    if session.on_overflow is not None:
        session.on_overflow(optimizer, scale)


def model_record(model: nn.Module) -> ModelRecord:
    """Return the record of a model, a new one if there is none."""
    record = session.models.get(model)
    if record is None:
        record = session.models[model] = ModelRecord()
    return record


def optimizer_record(optimizer: Optimizer) -> OptimizerRecord:
    """Return the record of an optimizer, a new one if there is none."""
    record = session.optimizers.get(optimizer)
    if record is None:
        record = session.optimizers[optimizer] = OptimizerRecord()
    return record


def set_applied(model: nn.Module, applied: Applied) -> None:
    """Note that a model is distributed, after those that already are."""
    record = model_record(model)
    record.applied = applied
    del session.models[model]
    session.models[model] = record
    for name, param in model.named_parameters():
        session.parameters[param] = (name, param.requires_grad)


def applied_to(model: nn.Module) -> Applied | None:
    """Return what `apply` made of this module, or None."""
    record = session.models.get(model)
    return None if record is None else record.applied


def list_applied() -> list[Applied]:
    """Return what `apply` made of every module that still lives."""
    return [record.applied for record in session.models.values() if record.applied is not None]


def distributed_models() -> list[nn.Module]:
    """Return every distributed module that still lives, in the order in which they were distributed."""
    return [model for model, record in session.models.items() if record.applied is not None]


def distributed_optimizers() -> list[Optimizer]:
    """Return every distributed optimizer that still lives, in the order of their records."""
    return [optimizer for optimizer, record in session.optimizers.items() if record.is_distributed]


def is_distributed_optimizer(optimizer: Optimizer) -> bool:
    """Return whether an optimizer was given to this job."""
    record = session.optimizers.get(optimizer)
    return record is not None and record.is_distributed


def accumulation_of(optimizer: Optimizer) -> GradientAccumulation | None:
    """Return the group of batches whose gradients are merged for an optimizer; None if each batch is an update."""
    for group in optimizer.param_groups if session.accumulations else ():
        for param in group["params"]:
            merge: GradientAccumulation | None = session.accumulations.get(param, lambda: None)()
            if merge is not None:
                return merge
    return None


def is_anything_distributed() -> bool:
    """Return whether this process distributed a model or an optimizer."""
    return bool(list_applied() or distributed_optimizers())


def parameter_name(param: Tensor) -> str | None:
    """Return the plain name of a parameter that is in a distributed model now, or was when it was distributed."""
    for model in distributed_models():
        for name, member in model.named_parameters():
            if member is param:
                return name
    name, _ = session.parameters.get(param, (None, False))
    return name  # type: ignore[no-any-return]


def is_any_named(params: Sequence[Tensor]) -> bool:
    """Return whether any of these has a name by `parameter_name`; each model is walked through once."""
    members = {id(member) for model in distributed_models() for member in model.parameters()} if params else set()
    return any(id(param) in members or param in session.parameters for param in params)


def observe_loss(loss: Tensor) -> None:
    """Pass this rank's loss of the step at hand to every model's updates that follow it."""
    for applied in list_applied():
        for updater in applied.updaters:
            updater.observe(loss)
