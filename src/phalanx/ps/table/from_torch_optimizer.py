"""`rule_of`: map a torch optimizer to the update rule of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError
from torch.optim import Optimizer

from phalanx.errors import ConfigError
from phalanx.ps.table.update_rules import SGD, Adagrad, Adam, Momentum, RMSprop, Rule

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


def _alike(rule: type[Any], group: Group, **others: object) -> Rule:
    """Return a rule with the options that the optimizer calls by the same names, and with `others`."""
    same = {field.name: group[field.name] for field in dataclasses.fields(rule) if field.name in group}
    built: Rule = rule(**{**same, "lr": SENT, **others})
    return built


def _sgd(group: Group) -> Rule:
    return _alike(Momentum if group["momentum"] else SGD, group)


def _adam(group: Group) -> Rule:
    return _alike(Adam, group, decoupled=group.get("decoupled_weight_decay", False))


def _rmsprop(group: Group) -> Rule:
    if group["momentum"]:
        raise ConfigError("a table cannot follow RMSprop with momentum. Leave momentum out.")
    return _alike(RMSprop, group)


_RULES: dict[type[Optimizer], Callable[[Group], Rule]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: partial(_alike, Adam, decoupled=True),
    torch.optim.SparseAdam: _adam,
    torch.optim.Adagrad: partial(_alike, Adagrad),
    torch.optim.RMSprop: _rmsprop,
}
