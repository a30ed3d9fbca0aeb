"""`explain_memory`: explain out-of-memory errors: what fills the memory, and which setting would save most."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import phalanx.comm.context as context_of
from phalanx.data.loader.binding import Inputs
from phalanx.errors import ConfigError
from phalanx.parallel.memory.estimate import activation_bytes, as_trained, computes_elsewhere, is_averaged, state_of
from phalanx.parallel.memory.failures import is_out_of_memory
from phalanx.parallel.session import Applied, applied_to, distributed_models, distributed_optimizers
from phalanx.plan.memory import StateOf, memory_of, memory_table
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.value import AllReduce, Frozen, Plan, ReduceScatter
from phalanx.strategy.table import as_text

logger = logging.getLogger("phalanx.parallel")

_TRIAL_ROWS = 2
"""Rows of the forward pass that measures activations; batch normalisation takes no fewer."""

_HEAD = "Out of memory:"


@contextmanager
def memory_explained(model: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Add a note to an error of the block that says that memory ran out: what holds it, and what would save most.

    Args:
        model: Trained in the block; a plain one gets no note.
        inputs: Its arguments, of which a few rows are computed once more to measure activations.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        applied = applied_to(model)
        if applied is not None and is_out_of_memory(error):
            _add_note(error, [_account(applied, model, inputs)])
        raise


def explain_memory(error: BaseException) -> None:
    """Add the note for all distributed models to an error that says that memory ran out, unless it has one."""
    if is_out_of_memory(error) and not any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ())):
        models = [(model, applied) for model in distributed_models() if (applied := applied_to(model)) is not None]
        _add_note(error, [_account(applied, model, None) for model, applied in models])


def _add_note(error: BaseException, accounts: list[str]) -> None:
    if accounts:
        head = f"{_HEAD} what rank {context_of.current().rank} holds, and what would save most."
        error.add_note("\n".join((head, *accounts)))


def _account(applied: Applied, model: nn.Module, inputs: Inputs | None) -> str:
    """Return the table of a model's memory, and what would save most of it."""
    rank, shape = context_of.current().rank, as_trained(applied.shape, model)
    state, averaged = _state_of(model), is_averaged(model)
    memory = memory_of(applied.plan, shape, rank, state, averaged=averaged)
    lines = as_text(memory_table(memory, rank), width=100).splitlines()
    activations = None if inputs is None else _activations(applied, model, inputs)
    if activations is not None:
        lines.append(f"one forward pass of this batch keeps about {activations:,} bytes of activations")
    sharded = _as_sharded(applied.plan)
    saved = None if sharded is None else memory.total - memory_of(sharded, shape, rank, state, averaged=averaged).total
    return "\n".join(lines + _settings(applied.plan, activations, saved))


def _settings(plan: Plan, activations: int | None, sharding: int | None) -> list[str]:
    """Return a line for each setting that would save memory, the most first; what was not measured comes before."""
    of_pass = math.inf if activations is None else float(activations)
    savings = [(of_pass / 2, f"half the rows in a batch, with gradient_merge over {2 * plan.step.accumulate} batches")]
    if all(rule.recompute == "none" for rule in plan.modules):
        savings.append((of_pass, "strategy.recompute = True, which keeps no more of most modules than their inputs"))
    if sharding is not None:
        savings.append((sharding, 'strategy.sharding = True with strategy.sharding_configs = {"stage": 3}'))
    return [
        f"- {name}: saves {'what px.explain(model, inputs) tells' if math.isinf(size) else f'about {size:,.0f} bytes'}"
        for size, name in sorted(savings, reverse=True)
    ]


def _as_sharded(plan: Plan) -> Plan | None:
    """Return the Plan with sharding, if it could have it and has not."""
    ranks = math.prod(plan.axis_size(name) for name in plan.step.batch_axes)
    is_staged = any(axis.name == STAGE_AXIS for axis in plan.mesh)
    if ranks == 1 or is_staged or not all(isinstance(rule.update, (AllReduce, Frozen)) for rule in plan.params):
        return None
    rules = (
        rule.model_copy(update={"update": ReduceScatter(zero=3)}) if isinstance(rule.update, AllReduce) else rule
        for rule in plan.params
    )
    return plan.model_copy(update={"params": tuple(rules)})


def _state_of(model: nn.Module) -> StateOf | None:
    """Return what the model's optimizer keeps, if there is one and its class is known."""
    mine = {id(param) for param in model.parameters()}
    optimizers = [
        optimizer
        for optimizer in distributed_optimizers()
        if any(id(param) in mine for group in optimizer.param_groups for param in group["params"])
    ]
    try:
        return state_of(optimizers[0]) if len(optimizers) == 1 else None
    except ConfigError:  # the table then has no row of it
        return None


def _activations(applied: Applied, model: nn.Module, inputs: Inputs) -> int | None:
    """Return about what one forward pass of a batch keeps; None where this process alone cannot tell."""
    rows = next((len(x) for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim()), 0)
    meets_others = applied.plan.step.sync_bn or any(rule.managed == "module" for rule in applied.plan.params)
    if rows < _TRIAL_ROWS or meets_others or computes_elsewhere(applied):
        return None
    few = tree_map_only(Tensor, lambda x: x[:_TRIAL_ROWS] if x.dim() and len(x) == rows else x, inputs)
    try:
        return activation_bytes(model, few) * rows // _TRIAL_ROWS
    except Exception as error:  # noqa: BLE001 -- the script's own code, and the first error must be seen whatever it does
        logger.info("activations could not be measured: %s", error)
        return None
