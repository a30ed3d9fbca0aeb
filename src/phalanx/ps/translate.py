"""Which update rule of a table stands for a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch.optim import Optimizer

from phalanx.errors import ConfigError
from phalanx.ps.rules import SGD, Adagrad, Adam, Momentum, RMSprop, Rule

Group = Mapping[str, Any]

SENT = 0.0
"""Learning rate in the rule of a table that follows an optimizer: the current one comes with every push."""


def rule_of(optimizer: Optimizer, group: Group) -> Rule:
    """Return the rule that updates rows as this optimizer updates the parameters of one of its groups.

    Args:
        optimizer: A torch optimizer.
        group: One of its `param_groups`.

    Raises:
        ConfigError: If no table can do what the optimizer does; names the optimizer or the option.
    """
    make = _RULES.get(type(optimizer))
    kind = type(optimizer).__name__
    if make is None:
        raise ConfigError(
            f"a table cannot follow {kind}. Use one of {', '.join(t.__name__ for t in _RULES)} for the parameters on "
            "servers, or give SparseEmbedding an optimizer= of its own (phalanx.ps.SGD, FTRL, ...)."
        )
    for option in ("maximize", "amsgrad", "centered"):
        if group.get(option):
            raise ConfigError(f"a table cannot follow {kind} with {option}=True. Leave it out.")
    try:
        return make(group)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"a table cannot follow {kind} with {first['loc'][-1]}={first['input']!r}: {first['msg']}."
        ) from None


def _sgd(group: Group) -> Rule:
    if not group["momentum"]:
        return SGD(lr=SENT, weight_decay=group["weight_decay"])
    return Momentum(
        lr=SENT,
        momentum=group["momentum"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        weight_decay=group["weight_decay"],
    )


def _adam(group: Group) -> Rule:
    return Adam(
        lr=SENT,
        betas=tuple(group["betas"]),
        eps=group["eps"],
        weight_decay=group.get("weight_decay", 0.0),
        decoupled=group.get("decoupled_weight_decay", False),
    )


def _adagrad(group: Group) -> Rule:
    return Adagrad(
        lr=SENT,
        lr_decay=group["lr_decay"],
        weight_decay=group["weight_decay"],
        initial_accumulator_value=group["initial_accumulator_value"],
        eps=group["eps"],
    )


def _rmsprop(group: Group) -> Rule:
    if group["momentum"]:
        raise ConfigError("a table cannot follow RMSprop with momentum. Leave momentum out.")
    return RMSprop(lr=SENT, alpha=group["alpha"], eps=group["eps"], weight_decay=group["weight_decay"])


def _adamw(group: Group) -> Rule:
    return _adam({**group, "decoupled_weight_decay": True})


_RULES: dict[type[Optimizer], Callable[[Group], Rule]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
    torch.optim.SparseAdam: _adam,
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
}
