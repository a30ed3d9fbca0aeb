"""`find_shardable_layers`: check on meta tensors that a model's code runs when layers leave activations sharded.

`auto/capture/module_calls` knows which operators let a shard pass. A model may still name a size, such as the number of
heads, that is another on a rank; then its code fails on the narrow tensors, and the layers cannot be sharded that way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.auto.capture.fake_copy import copy_parts, preserve_rng_state
from phalanx.auto.capture.layers import LayerStrategy
from phalanx.auto.capture.step import arguments_of, capture, list_gradient_roots
from phalanx.data.loader.binding import LossFunction
from phalanx.errors import ConfigError

_SHARDABLE = (nn.Linear, nn.Embedding, nn.Dropout)
"""Layers that have styles, of exactly these classes: subclasses may compute something else."""


def find_shardable_layers(model: nn.Module) -> frozenset[str]:
    """Return the paths of the layers that `px.shard` takes: `parallel/tensor/styles` says which."""
    return frozenset(path for path, module in model.named_modules() if _has_styles(module))


def _has_styles(module: nn.Module) -> bool:
    if type(module) not in _SHARDABLE:
        return False
    # Some wrappers of weights, as spectral_norm is, leave the class and hold the weight under another name.
    whole = isinstance(module, nn.Dropout) or module._parameters.get("weight") is not None
    return whole and not any(getattr(module, word, None) for word in ("max_norm", "scale_grad_by_freq", "sparse"))


def check_runs_sharded(
    model: nn.Module, sample: Any, loss_fn: LossFunction | None, strategies: Mapping[str, LayerStrategy], ranks: int
) -> str | None:
    """Return why a model fails if layers leave or take activations sharded; None if it runs.

    Args:
        model: The whole model; not changed.
        sample: As `capture` takes it.
        loss_fn: As `capture` takes it.
        strategies: Layers, by path, and how they are computed.
        ranks: Parts.
    """
    narrow, batch, loss = copy_parts((model, sample, loss_fn), on_meta)
    for path, strategy in strategies.items():
        layer = narrow.get_submodule(path)
        if strategy.style != "sequence" and strategy.input_state == "tokens":
            layer.register_forward_pre_hook(partial(_tokens_together, ranks))
        if strategy.style != "sequence" and strategy.output_state == "tokens":
            layer.register_forward_hook(partial(_first_tokens, ranks))
        if strategy.style not in ("column", "row"):
            continue
        if strategy.has_sharded_output:
            layer.weight = _first_part(layer.weight, 0, ranks)
            layer.bias = None if layer.bias is None else _first_part(layer.bias, 0, ranks)
        elif strategy.has_sharded_input:
            layer.weight = _first_part(layer.weight, 1, ranks)
    if find_failure(narrow, batch, loss) is None:
        return None
    try:  # for what asks for values, which shapes alone do not have
        capture(narrow, batch, loss)
    except ConfigError as error:
        return str(error)
    return None


def find_failure(model: nn.Module, sample: Any, loss_fn: LossFunction | None) -> Exception | None:
    """Return what both passes raise on shapes alone; None if they run. A capture takes several times as long."""
    inputs = arguments_of(model, sample, has_target=loss_fn is not None)
    try:
        with preserve_rng_state(), torch.inference_mode(False), torch.enable_grad():
            outputs = model(*inputs.positional, **inputs.keywords)
            result = outputs if loss_fn is None else loss_fn(outputs, inputs.target)
            ends = list_gradient_roots(result)
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    except Exception as error:  # noqa: BLE001  # a model's own code may raise anything
        return error
    return None


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor's shape and dtype without values."""
    meta = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta.requires_grad_(tensor.requires_grad)


def _first_part(param: nn.Parameter, dim: int, ranks: int) -> nn.Parameter:
    size = -(-param.shape[dim] // ranks)
    return nn.Parameter(param.detach().narrow(dim, 0, size), requires_grad=param.requires_grad)


def _tokens_together(ranks: int, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.cat([inputs[0]] * ranks, -2),)


def _first_tokens(ranks: int, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.narrow(-2, 0, output.shape[-2] // ranks)
