"""`search_plan`: search the fastest Plan of a `Model` on rank 0 and broadcast it (AUTO_PARALLEL)."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.checkpoint.ranks import Ranks
from phalanx.comm.agreement import agree, share
from phalanx.comm.context import Context, current
from phalanx.data.loader.binding import LossFunction
from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import ConfigError, PlanError
from phalanx.i18n import tr
from phalanx.parallel.apply import broadcast_from_first_rank, check_model
from phalanx.parallel.model_shape import is_handle, shape_of
from phalanx.parallel.session import model_record
from phalanx.plan.value import Plan
from phalanx.strategy import DistributedStrategy
from phalanx.train.job_cluster import cluster_of
from phalanx.train.loss.batch_reader import BatchReader
from phalanx.train.model.auto_context import SEARCH_MODES, auto_context

if TYPE_CHECKING:
    from phalanx.auto.capture.step import Arguments

logger = logging.getLogger("phalanx.train")

SEARCH_S = 60.0
"""Seconds after which the best Plan so far is taken, with its gap in the log."""

PATIENCE_S = 600.0
"""Seconds that ranks wait for each other: a model may take long to capture, and data long to open."""


def search_plan(
    net: nn.Module,
    loss_fn: LossFunction | None,
    optimizer: Optimizer,
    loader: ShardedLoader,
    strategy: DistributedStrategy,
    current: Context,
) -> Plan:
    """Return the fastest Plan for the ranks that were launched. Collective: all return what rank 0 found.

    Args:
        net: A plain module.
        loss_fn: Takes the net's output and the target; None for a net that returns its loss.
        optimizer: What trains it.
        loader: The data; one batch of it is looked at, and iterating it starts where it would have.
        strategy: Settings of everything that the planner does not decide.
        current: This process.

    Raises:
        ConfigError: If the net cannot be captured or nothing fits; on all ranks.
    """
    if current.role.server_endpoints:
        raise ConfigError(
            tr(
                "AUTO_PARALLEL plans for workers that hold all parameters, and this job has servers. Launch it "
                "without, or write DATA_PARALLEL."
            )
        )
    require_no_tables(net)
    sample: Any = None

    def look() -> None:
        nonlocal sample
        loader.keep_global_batch(
            current.world_size
        )  # the Plan is for this many samples, on however many ranks it puts them
        sample = global_batch(loader, net, has_target=loss_fn is not None)

    def search(_: Any) -> dict[str, Any]:
        return _search_plan(net, sample, loss_fn, optimizer, strategy, current).model_dump(mode="json")

    ranks = Ranks.meet("AUTO_PARALLEL", strategy.model_dump(mode="json"), timeout_s=PATIENCE_S)
    decision = ranks.decide("the Plan of AUTO_PARALLEL", look, search, timeout_s=PATIENCE_S)
    return Plan.model_validate_json(json.dumps(decision), strict=True)


def prepare_for_plan(net: nn.Module, loader: ShardedLoader, plan: Plan, *, has_target: bool | None = None) -> None:
    """Let data be those of the step that a given Plan is of. Collective.

    The global batch stays what it is, on however many ranks the Plan puts it. For a Plan that places single operators,
    rank 0 captures the step that it is compared with, unless it captured one of the net already.

    Args:
        net: A plain module.
        loader: The data; one batch of it is looked at, and iterating it starts where it would have.
        plan: What will be applied.
        has_target: As `global_batch` takes it.

    Raises:
        ConfigError: If the net cannot be captured, or ranks have different Plans; on all ranks.
    """
    agree("plan", plan.model_dump(mode="json", exclude={"because"}), timeout_s=PATIENCE_S)
    loader.keep_global_batch(current().world_size)
    if not plan.ops:
        return
    ranks = Ranks.meet("the Plan of single operators", plan.capture_digest, timeout_s=PATIENCE_S)
    if share("captured step", model_record(net).captured_step is not None, timeout_s=PATIENCE_S):
        return
    sample: Any = None

    def look() -> None:
        nonlocal sample
        sample = global_batch(loader, net, has_target=has_target)

    def see(_: Any) -> None:
        from phalanx.auto.capture.step import capture  # a job that captures nothing does not wait for this

        capture(net, sample)

    try:
        ranks.decide("the step that the Plan is of", look, see, timeout_s=PATIENCE_S)
    except ConfigError as error:
        raise ConfigError(
            tr(
                "This Plan places single operators, and the step that it is of could not be captured from the data: "
                "{why} Or call phalanx.auto.capture.step.capture(model, sample) with what a global batch calls the "
                "model with before, on rank 0 at least.",
                why=error,
            )
        ) from error


def replicate_net(net: nn.Module, current: Context) -> None:
    """Replicate a net that has no Plan yet on all ranks, with rank 0's values. Collective.

    Args:
        net: A plain module.
        current: This process.

    Raises:
        ConfigError: If it is not the same net on all ranks.
    """
    logger.info("AUTO_PARALLEL plans for a batch of the training data: until train, every rank holds the whole net")
    check_model(net)
    agree("model before train", {param.name: list(param.shape) for param in shape_of(net).params})
    net.to(current.device)
    broadcast_from_first_rank(net, level=logging.DEBUG)


def global_batch(
    loader: ShardedLoader, net: nn.Module, *, has_target: bool | None, ranks: int | None = None
) -> Arguments:
    """Return how a net is called on one batch of all ranks, as tensors of its shapes without its values.

    Collective as iterating the loader is; does not move it.

    Args:
        loader: The data.
        net: What is called on them; the tensors are where its parameters are.
        has_target: Whether a column is the target, the others being inputs. None where a loop of the user's own
            decides: then the net's signature tells whether it takes the target too.
        ranks: How many will read their own samples, if not those that are here: a size per rank stands for more
            samples.
    """
    from phalanx.auto.capture.step import Arguments  # a job that captures nothing does not wait for this

    batch, share_here = loader.peek()
    read = BatchReader(net, target="if needed" if has_target is None else "apart" if has_target else "too")
    inputs, target = read(batch, loader.columns)
    all_rows = share_here.global_rows
    if ranks is not None:
        all_rows = all_rows * loader.global_batch_for(ranks) // loader.global_batch
    sample = Arguments.of(inputs, target if has_target else None)
    widened: Arguments = with_batch_size(sample, share_here.rows, all_rows, net)
    return widened


def batch_size_of(values: Any) -> int:
    """Return the samples of a batch: dimension 0 of the first tensor that has one; 0 if there is none."""
    return next((len(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def with_batch_size(values: Any, before: int, rows: int, net: nn.Module) -> Any:
    """Return values with every tensor of so many samples before as an empty one of other samples, where a net is."""
    device = next((param.device for param in net.parameters()), torch.device("cpu"))

    def widened(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = (rows, *value.shape[1:]) if value.dim() and len(value) == before else value.shape
        return torch.empty(shape, dtype=value.dtype, device=device)

    return tree_map(widened, values)


def _search_plan(
    net: nn.Module,
    sample: Any,
    loss_fn: LossFunction | None,
    optimizer: Optimizer,
    strategy: DistributedStrategy,
    current: Context,
) -> Plan:
    from phalanx.auto.auto_parallel import auto_parallel  # a job that plans nothing does not wait for this
    from phalanx.auto.search.result import format_percent

    if auto_context.search_mode is not None:
        logger.info("search_mode=%s: %s all mean the one search", auto_context.search_mode, ", ".join(SEARCH_MODES))
    logger.info("AUTO_PARALLEL looks for the fastest Plan of %s, for %g s at most", type(net).__name__, SEARCH_S)
    answer = auto_parallel(
        net,
        sample,
        loss_fn,
        cluster=cluster_of(current.role, current.device),
        optimizer=optimizer,
        return_outputs=False,
        strategy=strategy,
        top_k=1,
        time_limit=SEARCH_S,
    )
    best = answer.search.best
    cut = ", ".join(f"{path} {way}" for path, way in best.sharded_layers.items()) or "none"
    logger.info(
        "AUTO_PARALLEL trains with %s, layers cut: %s; predicted %.4g ms a step, at most %s %% over the best Plan, "
        "%.4g MiB a rank",
        best.config,
        cut,
        answer.seconds * 1e3,
        format_percent(answer.gap),
        answer.memory / 2**20,
    )
    return answer.plan


def require_no_tables(model: Any) -> None:
    """Raise if a model has tables on parameter servers, which the planner does not support.

    Raises:
        PlanError: Names the first table's parameter.
    """
    params = model.named_parameters() if isinstance(model, nn.Module) else ()
    name = next((name for name, param in params if is_handle(param)), None)
    if name is not None:
        raise PlanError(
            tr(
                "The planner was asked for a Plan of a model whose parameter {name!r} stands for a table of rows, "
                "which live on parameter servers. It plans models that hold all their parameters. Train this one as "
                "its strategy says, `phalanx run --server-num 1 --worker-num 2 train.py`, or build it with "
                "torch.nn.Embedding.",
                name=name,
            )
        )
