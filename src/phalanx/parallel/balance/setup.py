"""`use_split`: set up load balancing as a Plan asks for it: what is split over ranks, and whose updates are counted."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

from phalanx.comm.batch.sample_split import SampleSplit
from phalanx.comm.context import Context
from phalanx.parallel.balance.load_balance import LoadBalance, ReplicaSplit, RowSplit
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.session import StepPhase, session
from phalanx.parallel.step.hooks import add_action
from phalanx.plan.rules.balance import check_balance
from phalanx.plan.value import Plan


def use_split(plan: Plan, mesh: Mesh, context: Context) -> None:
    """Split global batches by the speed of ranks from now on if a Plan asks for it, else evenly.

    A split begins with the shares of the Plan, and one that was changed continues under a Plan that begins alike.

    Raises:
        PlanError: If it asks for what cannot be balanced.
    """
    check_balance(plan)
    ranks = mesh.size(mesh.batch_axes)
    if plan.step.balance != "samples" or ranks == 1:
        context.split = None
        return
    split = SampleSplit(ranks, plan.step.shares)
    if context.split is None or context.split.first_parts != split.first_parts:
        context.split = split


def balance_updates(optimizer: Optimizer, plan: Plan, context: Context) -> None:
    """Balance the ranks at the updates of an optimizer, where a Plan asks for it; at those of the first one given."""
    if plan.step.balance is None or context.readers.count == 1:
        return
    if session.balance is not None and session.balanced() is not None:
        return
    if plan.step.balance == "samples":
        assert context.split is not None
        balance = LoadBalance(context, RowSplit(context, context.split))
    else:
        assert context.replicas is not None
        balance = LoadBalance(context, ReplicaSplit(context, context.replicas))
    session.balance, session.balanced = balance, weakref.ref(optimizer)
    add_action(optimizer, StepPhase.BEGIN_UPDATE, balance.begin_update)
    add_action(optimizer, StepPhase.BALANCE_LOAD, balance.updated)
