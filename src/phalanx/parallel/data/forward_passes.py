"""`follow_forward_passes`: the batch of each forward pass of a model, and gradients that reach its outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import phalanx.comm.context as context_of
from phalanx.comm.batch.loaded_batches import tensors_in
from phalanx.comm.batch.passes import ForwardPass
from phalanx.comm.batch.share import Shares
from phalanx.parallel.data.sample_weights import times, weighted_outputs, without_views


def follow_forward_passes(model: nn.Module, *, is_sum: bool) -> None:
    """Let gradients of a model be of the batch that its forward passes are of.

    Args:
        model: The model, distributed.
        is_sum: Whether its gradients are summed over the ranks.
    """
    # Without state of their own, so that a copy of the model has them too.
    leave = partial(_leave, is_sum=is_sum)
    model.register_forward_pre_hook(_enter, with_kwargs=True)
    model.register_forward_hook(leave, with_kwargs=True, always_call=True)
    if model._compiled_call_impl is not None:
        # Hooks are part of the graph, which cannot look up a batch.
        model._compiled_call_impl = partial(_call, weakref.ref(model), model._compiled_call_impl, leave)


def _call(
    model: weakref.ref[nn.Module], compiled: Callable[..., Any], leave: Callable[..., Any], *inputs: Any, **named: Any
) -> Any:
    module = model()
    if module is None or torch.compiler.is_compiling():
        return compiled(*inputs, **named)
    _enter(module, inputs, named)
    try:
        outputs = compiled(*inputs, **named)
    except BaseException:
        _leave_raised(module)
        raise
    weighted = leave(module, inputs, named, outputs)
    return outputs if weighted is None else weighted


def _enter(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or not context_of.is_initialized():
        return
    context_of.current().passes.begin_forward(model, (inputs, named))


def _leave_raised(model: nn.Module) -> None:
    if context_of.is_initialized():
        context_of.current().passes.end_forward(model)


def _leave(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], outputs: Any, *, is_sum: bool) -> Any:
    if torch.compiler.is_compiling() or not context_of.is_initialized():
        return None
    shares = context_of.current().passes.end_forward(model)
    if shares is None or not torch.is_grad_enabled():
        return None
    return _watch_outputs(shares, outputs, (inputs, named), is_sum=is_sum)


def _watch_outputs(shares: Shares, outputs: Any, inputs: Any, *, is_sum: bool) -> Any:
    """Return outputs that refer to their forward pass, and weigh what arrives at them if need be."""
    context = context_of.current()
    seen = [x for x in tensors_in(outputs) if x.grad_fn is not None]
    mixes = context.passes.may_mix(shares, context.readers.shares) and _is_tree(outputs, len(seen))
    # Torch drops the hooks of a view that is changed in place.
    is_single = len(seen) == 1 and not seen[0]._is_view()
    forward = ForwardPass(shares, weighs=mixes or is_single, is_sum=is_sum)
    context.passes.add(forward, is_seen=bool(seen))
    if mixes:
        return weighted_outputs(without_views(outputs, inputs), partial(_factor, forward))
    for tensor in seen:
        tensor.register_hook(partial(_arrive, forward))
    return None


def _is_tree(outputs: Any, count: int) -> bool:
    """Return whether the leaves of outputs are all of their tensors with a graph, of which there are `count`."""
    return count == sum(isinstance(x, Tensor) and x.grad_fn is not None for x in tree_leaves(outputs))


def _factor(forward: ForwardPass) -> float:
    context = context_of.current()
    return context.passes.factor_at(forward, context.readers.shares)


def _arrive(forward: ForwardPass, gradient: Tensor) -> Tensor | None:
    factor = _factor(forward)
    return None if factor == 1.0 else times(gradient, factor)
