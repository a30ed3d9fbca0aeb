"""`Updater`: LocalSGD, top-k compression or reducer around the steps of a model's optimizers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.comm.context import Context
from phalanx.parallel.data.reducer import Reducer
from phalanx.parallel.data.sample_weights import sample_weight_hook
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.stateful import keep_state
from phalanx.parallel.update.local_sgd import LocalSgd
from phalanx.parallel.update.top_k import TopKCompressor
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

    def observe(self, loss: Tensor) -> None:
        """Take note of this rank's loss of the step at hand."""
        ...

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a block in which the model has the weights that a save holds, where they are others than a rank's."""
        ...


def build_updaters(
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
    rules = {name: plan.rule_for(name) for name, param in model.named_parameters() if param.requires_grad}
    update = next((rule.update for rule in rules.values() if isinstance(rule.update, (Average, TopK))), None)
    along = dict.fromkeys(reduced_along(plan, rule) for rule in rules.values())
    if update is None or not any(along):
        return ()
    groups = {axes: mesh.group(axes) for axes in along}  # by all ranks, whatever their stages hold
    shares = mesh.size(mesh.batch_axes)
    trained = {name: param for name, param in model.named_parameters() if name in rules and not param.is_meta}
    if reducer is None:  # it would weight them
        # A rank that trains apart follows the sum over ranks if its own gradient stands for all of them.
        gain = float(shares) if isinstance(update, Average) and update.reduce == "sum" else 1.0
        for param in trained.values():
            param.register_hook(sample_weight_hook(context, context.readers, is_sum=update.reduce == "sum", gain=gain))
    if isinstance(update, TopK):
        over = {name: groups[reduced_along(plan, rules[name])] for name in trained}
        compressor = TopKCompressor(trained, update, over, shares if update.reduce == "mean" else 1)
        is_whole = len(groups) == 1 and mesh.size(next(iter(groups))) == plan.world_size
        keep_state(model, "top_k", compressor, elsewhere="share" if is_whole else "drop")
        return (compressor,)
    (axes,) = groups
    local = LocalSgd(model, update, groups[axes], reducer)
    keep_state(model, "local_sgd", local, elsewhere="first")
    return (local,)
