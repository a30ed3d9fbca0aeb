"""`px.explain`: report what the Plan applied to a model does: placement, communication, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

import phalanx.comm.context as context_of
from phalanx.data.loader.binding import bind_argument
from phalanx.errors import ConfigError
from phalanx.parallel.memory.estimate import activation_bytes, as_trained, computes_elsewhere, is_averaged, state_of
from phalanx.parallel.model_profile import layer_kinds
from phalanx.parallel.session import applied_to, optimizer_record, session
from phalanx.parallel.step.hooks import list_phases
from phalanx.plan.report.explain import Explanation
from phalanx.plan.report.explain import explain as explain_plan


def explain(model: nn.Module, *inputs: Any, optimizer: Optimizer | None = None) -> Explanation:
    """Say what the Plan applied to a model does to it: what lives where, what travels, and why.

    `print` shows a table; `to_json()` gives the same for programs. Not collective, unless inputs are given.

    Args:
        model: A distributed model.
        *inputs: Arguments of its forward pass, or one dictionary of them by name. When given, one pass measures which
            kinds of layers hold the parameters and which compute, and one in training what is kept for the backward
            pass; every rank must call it, if layers are cut over ranks.
        optimizer: Its optimizer, whose state then counts as memory of this rank.

    Raises:
        ConfigError: If the model is not distributed.
    """
    applied = applied_to(model)
    if applied is None:
        raise ConfigError(
            f"explain needs a distributed model, and this {type(model).__name__} is not. Call distribute or "
            "distributed_model first; for a Plan that is not applied there is phalanx.plan.explain(plan, shape)."
        )
    shape = as_trained(applied.shape, model)
    arguments = bind_argument(model, inputs[0]) if len(inputs) == 1 else inputs
    explanation = explain_plan(
        applied.plan,
        shape,
        layer_kinds(model, arguments) if inputs else (),
        rank=context_of.current().rank,
        state=None if optimizer is None else state_of(optimizer),
        averaged=is_averaged(model),
        step=_step_of(model, optimizer),
    )
    shards = None if optimizer is None else optimizer_record(optimizer).shards
    memory = explanation.memory
    if shards is not None and memory is not None:  # of the whole state that the Plan of an elastic job says
        explanation = replace(explanation, memory=replace(memory, optimizer=round(memory.optimizer * shards.share)))
    if not inputs or computes_elsewhere(applied):
        return explanation
    return replace(explanation, activation_bytes=activation_bytes(model, arguments))


def _step_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[str, ...]:
    """Return what a step of the model's optimizer does; nothing where it has none, or several."""
    optimizers = [o for o, record in session.optimizers.items() if model in record.models]
    if optimizer is None and len(optimizers) == 1:
        (optimizer,) = optimizers
    return () if optimizer is None else list_phases(optimizer)
