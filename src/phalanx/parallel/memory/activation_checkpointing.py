"""`apply_recompute`: activation checkpointing: recompute modules in the backward pass (Chen et al., arXiv:1604.06174).

A checkpointed module keeps its inputs only. `selective` also keeps the results of matrix products, convolutions and
attention, which are what is expensive to compute again (Korthikanti et al., arXiv:2205.05198, section 5).
Random numbers, autocast and buffers that a module reads are the same in both passes, and buffers move once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from phalanx import accelerator
from phalanx.errors import PlanError, did_you_mean
from phalanx.parallel.data.forward_hooks import Forward, buffers_kept, wrap_forward
from phalanx.parallel.memory.guard.pass_state import ModuleState
from phalanx.parallel.tensor.context.shard import active_sequence_shard
from phalanx.plan.rules.recompute import recomputed_modules
from phalanx.plan.value import ModuleRule, matches

logger = logging.getLogger("phalanx.parallel")

_KEPT = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
"""Operators whose results `selective` keeps."""

Context = AbstractContextManager[Any]


def apply_recompute(rules: Sequence[ModuleRule], model: nn.Module) -> tuple[str, ...]:
    """Make the modules that rules name compute their forward pass again in backward, in place.

    The outermost module that is to be recomputed decides for all in it. A list of modules, which has no forward pass of
    its own, stands for its members. The model itself is never checkpointed as a whole: that would save nothing.

    Args:
        rules: Of a Plan, the last match wins; only `match`, `recompute` and `offload` are read.
        model: The module, on its device.

    Returns:
        The names of the modules that are recomputed.

    Raises:
        PlanError: If a rule to recompute names no module, or offloads what is not recomputed.
    """
    names = [name for name, _ in model.named_modules() if name]
    for rule in rules:
        if rule.offload and rule.recompute == "none":
            raise PlanError(
                f"modules[{rule.match}].offload moves what a recomputed module keeps, and the module is not "
                'recomputed. Add recompute = "full", or remove offload.'
            )
        if rule.recompute != "none" and not any(matches(rule.match, name) for name in names):
            raise PlanError(
                f"recompute names {rule.match!r}, and the model has no such module.{did_you_mean(rule.match, names)} "
                "print(model) shows the names; * stands for anything."
            )
    modules = ((name, isinstance(module, (nn.ModuleList, nn.ModuleDict))) for name, module in model.named_modules())
    chosen = recomputed_modules(rules, modules)
    for name, rule in chosen.items():
        module = model.get_submodule(name)
        wrap_forward(module, recomputed, module, rule)
    if any(rule.offload for rule in chosen.values()) and all(p.device.type == "cpu" for p in model.parameters()):
        logger.warning("offload of recomputed modules has no effect: the model computes in host memory already.")
    return tuple(chosen)


def recomputed(forward: Forward, module: nn.Module, rule: ModuleRule, *args: Any, **kwargs: Any) -> Any:
    """Compute a module's forward pass, and again in backward, as a rule says."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    keep = save_on_cpu(pin_memory=accelerator.can_pin()) if rule.offload else nullcontext()
    selective = rule.recompute == "selective"
    with keep:
        if not torch.compiler.is_compiling():
            contexts = partial(_contexts, module, selective)
            forward, args, kwargs = _each_once(forward, args, kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if selective:
            contexts = partial(create_selective_checkpoint_contexts, _saved_operators())
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)  # a graph moves buffers once by itself


def _each_once(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Forward, tuple[Any, ...], dict[str, Any]]:
    """Return a call that is given no tensor twice.

    Torch saves each argument by itself, so what was one tensor would be several when the call is repeated, and a module
    that asks for it computes otherwise: `nn.MultiheadAttention` of a query that is its key.
    """
    names: list[int | str] = [*range(len(args)), *kwargs]
    values: dict[int | str, Any] = dict(zip(names, (*args, *kwargs.values()), strict=True))
    first = {id(value): name for name, value in reversed(values.items()) if isinstance(value, torch.Tensor)}
    same = {name: first[id(value)] for name, value in values.items() if first.get(id(value), name) != name}
    if not same:
        return forward, args, kwargs

    def call(*args: Any, **kwargs: Any) -> Any:
        by_name = dict(zip(names, (*args, *kwargs.values()), strict=True))
        again = {name: by_name[same.get(name, name)] for name in names}
        return forward(*(again[at] for at in range(len(args))), **{name: again[name] for name in kwargs})

    once = {name: None if name in same else value for name, value in values.items()}
    return call, tuple(once[at] for at in range(len(args))), {name: once[name] for name in kwargs}


def _contexts(module: nn.Module, selective: bool) -> tuple[Context, Context]:
    """Return what surrounds the forward pass and its repetition."""
    first, again = (
        create_selective_checkpoint_contexts(_saved_operators()) if selective else (nullcontext(), nullcontext())
    )
    return first, _repeat(again, module, active_sequence_shard(), ModuleState(module))


@contextmanager
def _repeat(around: Context, module: nn.Module, part: Context, before: ModuleState) -> Iterator[None]:
    """Compute again from the state before, on the same part of a sequence; buffers do not move again."""
    with buffers_kept(module), before.again(), around, part:
        yield


def _saved_operators() -> list[Any]:
    return [getattr(torch.ops.aten, name).default for name in _KEPT if hasattr(torch.ops.aten, name)]
