"""A batch meets a net: columns that have names are given by name, others in their order; outputs are read by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from torch import nn

from phalanx.errors import ConfigError

Inputs = tuple[Any, ...] | dict[str, Any]
"""What a net is called with: all by position, or all by name."""

_NEAR, _FAR = 0.8, 0.6
"""How alike names are (1: equal) of which one must be meant where `**kwargs` takes any, or may be meant elsewhere."""


def call(net: nn.Module, inputs: Inputs) -> Any:
    """Return what a net makes of inputs."""
    return net(**inputs) if isinstance(inputs, dict) else net(*inputs)


@dataclass(frozen=True, slots=True)
class Binding:
    """Which columns of a batch a net is called with, and whether by name."""

    columns: tuple[Any, ...]
    by_name: bool = False

    def inputs(self, batch: Mapping[Any, Any]) -> Inputs:
        """Return the net's inputs of a batch by column."""
        if self.by_name:
            return {name: batch[name] for name in self.columns}
        return tuple(batch[name] for name in self.columns)


def bind(net: nn.Module, columns: Sequence[Any], *, is_ordered: bool, beside: str = "") -> Binding:
    """Return how a net is called with columns.

    Columns without names are given in their order. Columns with names are given by name as soon as one of them is the
    name of a parameter; all must be then, unless the net takes any name. Where none is, one column alone is the net's
    first argument, and columns whose order counts are given in it.

    Args:
        net: Its forward pass tells the parameters.
        columns: Names, or numbers of columns without names.
        is_ordered: Whether the order of the columns counts, as in a tuple; else they are a dictionary's.
        beside: What else the batch has, for the message.

    Raises:
        ConfigError: If the net cannot be called with them; names columns and parameters.
    """
    takes = signature_of(net)
    if all(isinstance(name, str) for name in columns):
        if _is_by_name(takes, columns, is_ordered=is_ordered):
            _check_named(net, takes, columns)
            return Binding(tuple(columns), by_name=True)
        if not is_ordered and len(columns) > 1 and fits(takes, len(columns)):
            _check_named(net, takes, columns)  # a dictionary's order says nothing
    if not fits(takes, len(columns)):
        raise ConfigError(
            f"{type(net).__name__} takes {described(takes)}, and the batch has {len(columns)} "
            f"input{'s' * (len(columns) != 1)}{beside}. Let the data yield what the net takes."
        )
    return Binding(tuple(columns))


def bind_argument(net: nn.Module, inputs: Any) -> Inputs:
    """Return what a net is called with for one argument of the user's: the columns of a dictionary are given by name.

    A net that names none of them is given the dictionary.

    Raises:
        ConfigError: If it names some, and cannot be called with all.
    """
    if not isinstance(inputs, Mapping):
        return (inputs,)
    named = dict(inputs)
    takes = signature_of(net)
    if not parameters_of(takes).keys() & named.keys() and fits(takes, 1):
        return (inputs,)
    return bind(net, tuple(named), is_ordered=False).inputs(named)


def signature_of(net: nn.Module) -> inspect.Signature:
    """Return the signature of a net's forward pass; of what it wraps, where it passes on whatever it is given."""
    takes = inspect.signature(net.forward)
    inner = getattr(net, "_orig_mod", None) or getattr(net, "module", None)  # torch.compile's and torch's wrappers
    if {p.kind for p in takes.parameters.values()} == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
        return signature_of(inner) if isinstance(inner, nn.Module) else takes
    return takes


def parameters_of(takes: inspect.Signature) -> dict[str, Parameter]:
    """Return the parameters that may be given by name."""
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    return {name: parameter for name, parameter in takes.parameters.items() if parameter.kind in kinds}


def fits(takes: inspect.Signature, count: int) -> bool:
    """Return whether so many arguments can be given by position."""
    try:
        takes.bind(*range(count))
    except TypeError:
        return False
    return True


def described(takes: inspect.Signature) -> str:
    """Return the parameters as a script writes them, without types."""
    return str(
        takes.replace(
            parameters=[one.replace(annotation=one.empty) for one in takes.parameters.values()],
            return_annotation=takes.empty,
        )
    )


def entry_of(output: Any, name: str) -> Any:
    """Return what an output of several values calls so, such as the `loss` or `logits` of a ModelOutput; None if not.

    Args:
        output: What a net returned: a mapping, an object, or anything else.
        name: The value's.
    """
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _is_by_name(takes: inspect.Signature, columns: Sequence[str], *, is_ordered: bool) -> bool:
    """Return whether columns with names are given by name, not in their order."""
    own = parameters_of(takes)
    if len(columns) == 1 and fits(takes, 1):
        return columns[0] in own and columns[0] != next(iter(takes.parameters))
    if not own.keys() & set(columns):
        return _takes_any_name(takes) and not own and not is_ordered
    return not (is_ordered and _is_own_order(takes, columns))


def _is_own_order(takes: inspect.Signature, columns: Sequence[str]) -> bool:
    """Return whether in their order columns come to the parameters of their names, and the others to `*args`."""
    places = [one for one in takes.parameters.values() if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
    nameless = [one for one in places if one.kind in (one.VAR_POSITIONAL, one.POSITIONAL_ONLY)]
    return bool(nameless) and all(
        one in nameless or name == one.name for name, one in zip(columns, places, strict=False)
    )


def _check_named(net: nn.Module, takes: inspect.Signature, columns: Sequence[str]) -> None:
    """Raise unless the net can be called with columns of these names."""
    own = parameters_of(takes)
    free = [name for name in own if name not in columns]
    head = f"{type(net).__name__} takes {described(takes)}, and the batch has the column{'s' * (len(columns) != 1)} "
    unknown = [name for name in columns if name not in own]
    for name in unknown:
        near = difflib.get_close_matches(name, free, n=1, cutoff=_NEAR if _takes_any_name(takes) else _FAR)
        if near or not _takes_any_name(takes):
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{head}{', '.join(columns)}: no parameter is called {name!r}.{hint} "
                "Call columns as the parameters that they are for and leave others out, or let the data yield a tuple, "
                "whose order counts."
            )
    missing = [name for name in free if own[name].default is Parameter.empty]
    if missing:
        raise ConfigError(f"{head}{', '.join(columns)}: nothing for {missing[0]!r}. Call a column of the data so.")


def _takes_any_name(takes: inspect.Signature) -> bool:
    return any(one.kind is Parameter.VAR_KEYWORD for one in takes.parameters.values())
