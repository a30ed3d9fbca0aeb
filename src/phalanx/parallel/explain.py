"""`px.explain`: report what the Plan applied to a model does: placement, communication, memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.optim import Optimizer

import phalanx.comm.context as context_of
from phalanx.data.loader.binding import Inputs, bind_argument, call
from phalanx.errors import ConfigError
from phalanx.parallel.memory.estimate import activation_bytes, as_trained, computes_elsewhere, is_averaged, state_of
from phalanx.parallel.session import applied_to, optimizer_record, session
from phalanx.parallel.step.hooks import list_phases
from phalanx.plan.report.explain import Explanation
from phalanx.plan.report.explain import explain as explain_plan
from phalanx.plan.report.layer_profile import LayerKind, combined


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


@torch.no_grad()
def layer_kinds(model: nn.Module, inputs: Inputs) -> tuple[LayerKind, ...]:
    """Return parameters and multiplications of the kinds of layers in a model.

    Runs one forward pass in evaluation mode; collective if the model's layers are cut over ranks.

    Args:
        model: Any module; layers that are cut count as the whole layer.
        inputs: Arguments of its forward pass, by position or by name.
    """
    computed: dict[nn.Module, int] = {}
    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        for module in model.modules():
            handle = module.register_forward_hook(partial(_count, computed))
            stack.callback(handle.remove)
        call(model, inputs)
    seen: set[int] = set()
    profiles = []
    for module in model.modules():
        params = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen |= {id(param) for param in params}
        if params or computed.get(module):
            profiles.append(LayerKind(_kind(module), _elements(module, params), computed.get(module, 0)))
    return combined(profiles)


def _count(computed: dict[nn.Module, int], module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    if not isinstance(output, Tensor):
        return
    times = 0
    if isinstance(module, _ConvTransposeNd):
        times = inputs[0].numel() * module.weight[0].numel()
    elif isinstance(module, _ConvNd):
        times = output.numel() * module.weight[0].numel()
    elif isinstance(module, nn.Linear):
        times = output.shape[:-1].numel() * module.in_features * module.out_features
    computed[module] = computed.get(module, 0) + times


def _elements(module: nn.Module, params: Sequence[Tensor]) -> int:
    """Return the size of a layer's parameters, all ranks' slices together."""
    if isinstance(module, nn.Linear) and len(params) == len(list(module.parameters(recurse=False))):
        return module.out_features * (module.in_features + (module.bias is not None))
    if isinstance(module, nn.Embedding) and params:
        return module.num_embeddings * module.embedding_dim
    return sum(param.numel() for param in params)


def _kind(module: nn.Module) -> str:
    for kind, name in ((_ConvNd, "convolution"), (nn.Linear, "fully connected"), (nn.Embedding, "embedding")):
        if isinstance(module, kind):
            return name
    return "other"


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
