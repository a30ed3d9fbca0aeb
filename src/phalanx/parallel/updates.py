"""What happens around an optimizer's steps because of how a Plan updates a model's parameters."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.comm.context import Context
from phalanx.parallel.apply import applied
from phalanx.parallel.data_parallel import Reducer
from phalanx.parallel.kept_state import keep_state
from phalanx.parallel.local_sgd import LocalSgd
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.row_weights import weigher
from phalanx.parallel.top_k import Compressor
from phalanx.plan.mesh import reduced_along
from phalanx.plan.value import Average, Plan, TopK


class Updater(Protocol):
    """Acts around the steps of every optimizer of a model."""

    def bind(self, optimizer: Optimizer) -> None:
        """Act around the steps of an optimizer from now on.

        Raises:
            ConfigError: If it cannot be trained this way.
        """
        ...


def observe_loss(loss: Tensor) -> None:
    """Tell every model's updates this rank's loss of the step at hand."""
    for made in applied():
        for updater in made.updaters:
            if isinstance(updater, LocalSgd):
                updater.observe(loss)


def make_updaters(
    plan: Plan, model: nn.Module, mesh: Mesh, context: Context, reducer: Reducer | None
) -> tuple[Updater, ...]:
    """Return what acts around the steps of a model's optimizers. Collective over all ranks of the job.

    Args:
        plan: Fits the model (`fits.check_fits`), so that one rule trains it.
        model: The model, prepared.
        mesh: This rank's place.
        context: Tells the rows of the current batch.
        reducer: Averages gradients, if something does.
    """
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    updates = {plan.rule_for(name).update for name in trained}
    update = next((found for found in updates if isinstance(found, (Average, TopK))), None)
    axes = () if update is None else reduced_along(plan, plan.rule_for(next(iter(trained))))
    if update is None or not axes:
        return ()
    group, shares = mesh.group(axes), mesh.size(axes)
    if reducer is None:  # it would weight them
        # A rank that trains apart follows the sum over ranks if its own gradient stands for all of them.
        gain = float(shares) if isinstance(update, Average) and update.reduce == "sum" else 1.0
        for param in trained.values():
            param.register_hook(weigher(context, context.readers, gain))
    if isinstance(update, TopK):
        compressor = Compressor(trained, update, group, shares if update.reduce == "mean" else 1)
        keep_state(model, "top_k", compressor, elsewhere="share")
        return (compressor,)
    local = LocalSgd(model, update, group, reducer)
    keep_state(model, "local_sgd", local, elsewhere="first")
    return (local,)
