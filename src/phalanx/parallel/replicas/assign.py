"""`use_replicas`: assign the logical replicas of a Plan to its ranks, if the Plan is exact with them."""

from __future__ import annotations

import logging

import torch

from phalanx import accelerator
from phalanx.comm.batch.replicas import Replicas, assign_replicas
from phalanx.comm.context import Context
from phalanx.comm.elastic import membership as members
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.elastic.recovery import ElasticRecovery
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.replicas.exactness import why_inexact, why_lost
from phalanx.plan.value import Plan

logger = logging.getLogger("phalanx.parallel")


def use_replicas(plan: Plan, mesh: Mesh, context: Context) -> None:
    """Split training batches over the logical replicas of a Plan, if it has any, and set its number of threads.

    Raises:
        PlanError: If the Plan has something that replicas cannot be exact with.
        ConfigError: If there are fewer replicas than ranks.
    """
    membership = members.current()
    if plan.step.replicas is None:
        if membership is not None:
            raise ConfigError(
                "An elastic job (-n MIN:MAX) needs a fixed number of logical replicas. Add --replicas N, or replicas=N "
                "to px.distribute."
            )
        context.use_replicas(None)
        return
    assignment = assign_replicas(plan.step.replicas, mesh.size(mesh.batch_axes), plan.step.shares)
    is_elastic = membership is not None
    is_shared = is_elastic or len(assignment) < plan.step.replicas
    reason = why_inexact(plan, is_shared=is_shared, is_elastic=is_elastic) or (why_lost(plan) if is_elastic else None)
    if reason is not None:
        raise PlanError(f"logical replicas cannot be combined with {reason}.")
    split_over_replicas(plan, assignment, mesh, context)
    if context.rank == 0:
        most = max(map(len, assignment))
        logger.info(
            "logical replicas: %d, ranks: %d, replicas per rank: at most %d, threads per replica: %d; the weights have "
            "the same bits on any number of ranks%s",
            plan.step.replicas,
            len(assignment),
            most,
            plan.step.replica_threads,
            _limits(context),
        )


def split_over_replicas(plan: Plan, assignment: tuple[range, ...], mesh: Mesh, context: Context) -> None:
    """Assign the replicas of a Plan to its ranks, and compute with its number of threads."""
    before = context.replicas
    is_same = before is not None and (
        (before.count, len(before.assignment)) == (plan.step.replicas, len(assignment))
        and (plan.step.shares is None or before.first_assignment == assignment)
    )
    if not is_same:
        index, membership = mesh.index(mesh.batch_axes), members.current()
        replicas = Replicas(assignment, index, device=context.device, is_elastic=membership is not None)
        context.use_replicas(replicas)
        context.recovery = None if membership is None else ElasticRecovery(context, membership, replicas)
    torch.set_num_threads(plan.step.replica_threads)


def _limits(context: Context) -> str:
    """Return what the promise of equal bits depends on, as the end of a sentence."""
    if accelerator.is_accelerator(context.device) and not torch.are_deterministic_algorithms_enabled():
        return " of one kind of GPU, if torch.use_deterministic_algorithms(True) is set, which it is not"
    return f" with {'GPUs' if accelerator.is_accelerator(context.device) else 'processors'} of one kind"
