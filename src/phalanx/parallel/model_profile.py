"""`layer_kinds`: profile a model: parameters and multiply-adds by kind of layer, measured in one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from phalanx.data.loader.binding import Inputs, call
from phalanx.plan.report.layer_profile import LayerKind, combined


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
