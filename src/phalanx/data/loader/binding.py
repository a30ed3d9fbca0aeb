"""Bind the columns of a batch to the arguments of `model.forward`, by name or position."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from torch import Tensor, nn

from phalanx.errors import ConfigError

Inputs = tuple[Any, ...] | dict[str, Any]
"""Arguments of a model: all by position, or all by keyword."""

LossFunction = Callable[[Any, Any], Tensor]
"""From (output, target) to the loss."""

_NEAR, _FAR = 0.8, 0.6
"""Similarity (1: equal) above which a name counts as a typo of a parameter: with `**kwargs`, and without."""


def call(net: nn.Module, inputs: Inputs) -> Any:
    """Call a model with its inputs."""
    return net(**inputs) if isinstance(inputs, dict) else net(*inputs)


@dataclass(frozen=True, slots=True)
class Binding:
    """Which columns of a batch a model is called with, and whether by keyword."""

    columns: tuple[Any, ...]
    by_name: bool = False

    def inputs(self, batch: Mapping[Any, Any]) -> Inputs:
        """Return the model's inputs from a batch by column."""
        if self.by_name:
            return {name: batch[name] for name in self.columns}
        return tuple(batch[name] for name in self.columns)


def bind(net: nn.Module, columns: Sequence[Any], *, is_ordered: bool, beside: str = "") -> Binding:
    """Return how a model is called with columns.

    Columns without names are passed by position. Columns with names are passed by keyword if any of them is the name of
    a parameter; then all must be, unless the model takes any keyword. If none is, a single column is the first
    argument, and ordered columns are passed by position.

    Args:
        net: The model, whose forward pass has the parameters.
        columns: Names, or indices of columns without names.
        is_ordered: Whether the order of the columns counts, as in a tuple, unlike in a dictionary.
        beside: What else the batch has, for the message.

    Raises:
        ConfigError: If the model cannot be called with them; names columns and parameters.
    """
    takes = signature_of(net)
    if all(isinstance(name, str) for name in columns):
        if _is_by_name(takes, columns, is_ordered=is_ordered):
            _check_named(net, takes, columns)
            return Binding(tuple(columns), by_name=True)
        if not is_ordered and len(columns) > 1 and fits(takes, len(columns)):
            _check_named(net, takes, columns)  # a dictionary has no order
    if not fits(takes, len(columns)):
        raise ConfigError(
            f"{type(net).__name__} takes {describe_signature(takes)}, and the batch has {len(columns)} "
            f"input{'s' * (len(columns) != 1)}{beside}. Let the data yield what the net takes."
        )
    return Binding(tuple(columns))


def bind_argument(net: nn.Module, inputs: Any) -> Inputs:
    """Return the inputs of a model for one argument: the columns of a dictionary are passed by keyword.

    A model without a parameter of these names gets the dictionary.

    Raises:
        ConfigError: If it has some of them as parameters, and cannot be called with all.
    """
    if not isinstance(inputs, Mapping):
        return (inputs,)
    named = dict(inputs)
    takes = signature_of(net)
    if not parameters_of(takes).keys() & named.keys() and fits(takes, 1):
        return (inputs,)
    return bind(net, tuple(named), is_ordered=False).inputs(named)


def signature_of(net: nn.Module) -> inspect.Signature:
    """Return the signature of a model's forward pass, through wrappers that take `*args, **kwargs`."""
    takes = inspect.signature(net.forward)
    inner = getattr(net, "_orig_mod", None) or getattr(net, "module", None)  # torch.compile's and torch's wrappers
    if {p.kind for p in takes.parameters.values()} == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
        return signature_of(inner) if isinstance(inner, nn.Module) else takes
    return takes


def parameters_of(takes: inspect.Signature) -> dict[str, Parameter]:
    """Return the parameters that may be passed by keyword."""
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    return {name: parameter for name, parameter in takes.parameters.items() if parameter.kind in kinds}


def fits(takes: inspect.Signature, count: int) -> bool:
    """Return whether this many arguments can be passed by position."""
    try:
        takes.bind(*range(count))
    except TypeError:
        return False
    return True


def describe_signature(takes: inspect.Signature) -> str:
    """Return the parameters as source text, without types."""
    return str(
        takes.replace(
            parameters=[p.replace(annotation=p.empty) for p in takes.parameters.values()],
            return_annotation=takes.empty,
        )
    )


def entry_of(output: Any, name: str) -> Any:
    """Return an entry of an output by name, such as the `loss` or `logits` of a ModelOutput; None if missing.

    Args:
        output: What a model returned: a mapping, an object, or anything else.
        name: Name of the entry.
    """
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _is_by_name(takes: inspect.Signature, columns: Sequence[str], *, is_ordered: bool) -> bool:
    """Return whether columns with names are passed by keyword, not by position."""
    own = parameters_of(takes)
    if len(columns) == 1 and fits(takes, 1):
        return columns[0] in own and columns[0] != next(iter(takes.parameters))
    if not own.keys() & set(columns):
        return _takes_any_name(takes) and not own and not is_ordered
    return not (is_ordered and _is_own_order(takes, columns))


def _is_own_order(takes: inspect.Signature, columns: Sequence[str]) -> bool:
    """Return whether by position named columns match the parameters of their names, and the others go to `*args`."""
    positional = [
        parameter
        for parameter in takes.parameters.values()
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)
    ]
    unnamed = [
        parameter for parameter in positional if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY)
    ]
    return bool(unnamed) and all(
        parameter in unnamed or name == parameter.name for name, parameter in zip(columns, positional, strict=False)
    )


def _check_named(net: nn.Module, takes: inspect.Signature, columns: Sequence[str]) -> None:
    """Raise unless the model can be called with columns of these names."""
    own = parameters_of(takes)
    free = [name for name in own if name not in columns]
    plural = "s" * (len(columns) != 1)
    head = f"{type(net).__name__} takes {describe_signature(takes)}, and the batch has the column{plural} "
    unknown = [name for name in columns if name not in own]
    for name in unknown:
        near = difflib.get_close_matches(name, free, n=1, cutoff=_NEAR if _takes_any_name(takes) else _FAR)
        if near or not _takes_any_name(takes):
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{head}{', '.join(columns)}: no parameter is called {name!r}.{hint} "
                "Name columns like the parameters and drop the others, or let the data yield a tuple, "
                "whose order counts."
            )
    missing = [name for name in free if own[name].default is Parameter.empty]
    if missing:
        raise ConfigError(f"{head}{', '.join(columns)}: nothing for {missing[0]!r}. Call a column of the data so.")


def _takes_any_name(takes: inspect.Signature) -> bool:
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in takes.parameters.values())
