"""Whether the code between cut layers runs on cut activations: tried on shapes, as nothing else can tell.

`auto/capture/module_calls` knows which operators let a cut pass. A model may still name a size, such as the number of
heads, that is another on a rank; then its code fails on the narrow tensors, and the layers cannot be cut that way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.auto.capture.fake_copy import copied, random_numbers_kept
from phalanx.auto.capture.layers import Way
from phalanx.auto.capture.step import arguments_of, capture, gradients_start
from phalanx.data.loader.binding import LossFunction
from phalanx.errors import ConfigError

_CUT = (nn.Linear, nn.Embedding, nn.Dropout)
"""Layers that have styles, of exactly these classes: subclasses may compute something else."""


def may_be_cut(model: nn.Module) -> frozenset[str]:
    """Return the paths of the layers that `px.shard` takes: `parallel/tensor/styles` says which."""
    return frozenset(path for path, module in model.named_modules() if _has_styles(module))


def _has_styles(module: nn.Module) -> bool:
    if type(module) not in _CUT:
        return False
    # Some wrappers of weights, as spectral_norm is, leave the class and hold the weight under another name.
    whole = isinstance(module, nn.Dropout) or module._parameters.get("weight") is not None
    return whole and not any(getattr(module, word, None) for word in ("max_norm", "scale_grad_by_freq", "sparse"))


def cannot_run_cut(
    model: nn.Module, sample: Any, loss_fn: LossFunction | None, cut: Mapping[str, Way], ranks: int
) -> str | None:
    """Return why a model fails if layers leave or take activations cut; None if it runs.

    Args:
        model: The whole model; not changed.
        sample: As `capture` takes it.
        loss_fn: As `capture` takes it.
        cut: Layers, by path, and how they are computed.
        ranks: Parts.
    """
    narrow, batch, loss = copied((model, sample, loss_fn), _on_meta)
    for path, way in cut.items():
        layer = narrow.get_submodule(path)
        if way.style != "sequence" and way.takes == "tokens":
            layer.register_forward_pre_hook(partial(_tokens_together, ranks))
        if way.style != "sequence" and way.gives == "tokens":
            layer.register_forward_hook(partial(_first_tokens, ranks))
        if way.style not in ("column", "row"):
            continue
        if way.gives_cut:
            layer.weight = _first_part(layer.weight, 0, ranks)
            layer.bias = None if layer.bias is None else _first_part(layer.bias, 0, ranks)
        elif way.takes_cut:
            layer.weight = _first_part(layer.weight, 1, ranks)
    if _runs(narrow, batch, loss):
        return None
    try:  # for what asks for values, which shapes alone do not have
        capture(narrow, batch, loss)
    except ConfigError as error:
        return str(error)
    return None


def _runs(model: nn.Module, sample: Any, loss_fn: LossFunction | None) -> bool:
    """Return whether both passes run on shapes alone; a capture takes several times as long."""
    inputs = arguments_of(model, sample, has_target=loss_fn is not None)
    try:
        with random_numbers_kept(), torch.inference_mode(False), torch.enable_grad():
            outputs = model(*inputs.positional, **inputs.keywords)
            made = outputs if loss_fn is None else loss_fn(outputs, inputs.target)
            ends = gradients_start(made)
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    except Exception:  # noqa: BLE001  # a model's own code may raise anything; the capture says what
        return False
    return True


def _on_meta(tensor: Tensor) -> Tensor:
    made = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _first_part(param: nn.Parameter, dim: int, ranks: int) -> nn.Parameter:
    size = -(-param.shape[dim] // ranks)
    return nn.Parameter(param.detach().narrow(dim, 0, size), requires_grad=param.requires_grad)


def _tokens_together(ranks: int, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.cat([inputs[0]] * ranks, -2),)


def _first_tokens(ranks: int, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.narrow(-2, 0, output.shape[-2] // ranks)
