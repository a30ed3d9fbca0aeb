"""`use_lars`: momentum SGD with layer-wise rates (You, Gitman, Ginsburg, arXiv:1708.03888, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

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
from phalanx.strategy.configs import LarsConfigs

_DEFAULTS = LarsConfigs()


def use_lars(
    optimizer: Optimizer,
    *,
    coeff: float = _DEFAULTS.lars_coeff,
    weight_decay: float = _DEFAULTS.lars_weight_decay,
    epsilon: float = _DEFAULTS.epsilon,
    exclude: Sequence[str] = (),
    names: NameOf = parameter_name,
) -> None:
    """Make an SGD optimizer update by LARS. It stays the same object; learning rate and momentum stay its own.

    With w the parameter, g its gradient, and norms over the whole parameter however it is spread:

        local rate = coeff * norm(w) / (norm(g) + weight_decay * norm(w) + epsilon)
        v = momentum * v + lr * local rate * (g + weight_decay * w);    w = w - v

    The learning rate is inside `momentum_buffer`, as in the paper and unlike torch's SGD, whose state is therefore not
    to be carried over. A parameter, or gradient, of zeros has a local rate of 1, and so has an excluded one, without
    weight decay. Every step is collective over the groups over which parameters are spread.

    Args:
        optimizer: A `torch.optim.SGD`.
        coeff: The trust coefficient.
        weight_decay: Used instead of the optimizer's own.
        epsilon: Added to the denominator.
        exclude: Parts of parameter names, or globs.
        names: Tells the plain name of a parameter.

    Raises:
        StrategyError: If the optimizer is another, or has settings that LARS has not.
    """
    check_optimizer("lars", optimizer, (SGD,), weight_decay, without=("maximize", "dampening"))
    excluded = Exclusion(exclude, names)

    def update(optimizer: Optimizer) -> None:
        layers = layers_of(optimizer, excluded)
        if not layers:
            return
        of_values, of_gradients = norms_of(layers, (la.value for la in layers), (la.gradient for la in layers))
        # A gradient of zeros is told apart before weight decay hides it in the denominator.
        length = torch.where(of_gradients > 0, of_gradients + weight_decay * of_values + epsilon, 0.0)
        rates = trust_ratio(coeff * of_values, length)
        for layer, rate in zip(layers, rates.unbind(), strict=True):
            _momentum_update(layer, rate, weight_decay)

    replace_update(optimizer, update)


def _momentum_update(layer: Layer, rate: Tensor, weight_decay: float) -> None:
    settings, value = layer.settings, layer.value
    if layer.is_excluded:
        change = layer.gradient * settings["lr"]
    else:
        change = layer.gradient.add(value, alpha=weight_decay) * (rate * settings["lr"]).to(value.device, value.dtype)
    if settings["momentum"]:
        velocity = local_state(layer, "momentum_buffer").mul_(settings["momentum"]).add_(change)
        change = change.add_(velocity, alpha=settings["momentum"]) if settings["nesterov"] else velocity
    value.sub_(change)
