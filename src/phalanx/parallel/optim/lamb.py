"""`use_lamb`: LAMB optimizer: Adam with layer-wise trust ratios (You et al., arXiv:1904.00962, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from phalanx.parallel.optim.layerwise import (
    Exclusion,
    Layer,
    NameOf,
    check_optimizer,
    layers_of,
    local_state,
    norms_of,
    trust_ratio,
)
from phalanx.parallel.session import parameter_name
from phalanx.parallel.step.gate import replace_update
from phalanx.strategy.configs import LambConfigs

_DEFAULTS = LambConfigs()


def use_lamb(
    optimizer: Optimizer,
    *,
    weight_decay: float = _DEFAULTS.lamb_weight_decay,
    exclude: Sequence[str] = (),
    names: NameOf = parameter_name,
) -> None:
    """Make an Adam or AdamW optimizer update by LAMB. It stays the same object; rates, betas and eps stay its own.

    With m and v the means of the gradient and of its square, corrected for their start at zero, w the parameter, and
    norms over the whole parameter however it is spread:

        r = m / (sqrt(v) + eps) + weight_decay * w;    w = w - lr * norm(w) / norm(r) * r

    A parameter or r of zeros has a ratio of 1. Excluded parameters have no weight decay, and the ratio all the same.
    Every step is collective over the groups over which parameters are spread. `state_dict` is that of Adam.

    Args:
        optimizer: A `torch.optim.Adam` or `AdamW`.
        weight_decay: Used instead of the optimizer's own.
        exclude: Parts of parameter names, or globs.
        names: Tells the plain name of a parameter.

    Raises:
        StrategyError: If the optimizer is another, or has settings that LAMB has not.
    """
    check_optimizer("lamb", optimizer, (Adam, AdamW), weight_decay, without=("maximize", "amsgrad"))
    excluded = Exclusion(exclude, names)

    def update(optimizer: Optimizer) -> None:
        layers = layers_of(optimizer, excluded)
        if not layers:
            return
        directions = [_adam_update(layer, 0.0 if layer.is_excluded else weight_decay) for layer in layers]
        of_values, of_directions = norms_of(layers, (layer.value for layer in layers), directions)
        ratios = trust_ratio(of_values, of_directions)
        for layer, direction, ratio in zip(layers, directions, ratios.unbind(), strict=True):
            factor = (ratio * layer.settings["lr"]).to(layer.value.device, layer.value.dtype)
            layer.value.sub_(direction.mul_(factor))

    replace_update(optimizer, update)


def _adam_update(layer: Layer, weight_decay: float) -> Tensor:
    """Move the means of Adam, and return where they point."""
    beta1, beta2 = layer.settings["betas"]
    state, gradient = layer.state, layer.gradient
    state.setdefault("step", torch.tensor(0.0))
    state["step"] += 1
    steps = state["step"].item()
    mean, square = local_state(layer, "exp_avg"), local_state(layer, "exp_avg_sq")
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    spread = (square / (1 - beta2**steps)).sqrt_().add_(layer.settings["eps"])
    corrected: Tensor = mean / (1 - beta1**steps)
    return corrected.div_(spread).add_(layer.value, alpha=weight_decay)
