"""`pack_tree`, `unpack_tree`: nested dicts, lists and tuples with tensors as JSON and the tensors by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from phalanx.errors import ConfigError

_TENSOR, _ITEMS, _TUPLE = "$tensor", "$items", "$tuple"


def pack_tree(value: object, where: str, tensors: dict[str, Any], *, verb: str = "save") -> Any:
    """Return a tree of dicts, lists and tuples as JSON.

    Args:
        value: The tree.
        where: Its name, for messages and as the start of its tensors' names.
        tensors: Takes the tensors, by name.
        verb: What it was asked to do with the tree, for messages.

    Raises:
        ConfigError: If the tree holds something that is neither JSON nor a tensor; names where.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        while where in tensors:  # {"a": {"b": x}, "a.b": y}
            where += "'"
        tensors[where] = value
        return {_TENSOR: where}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: pack_tree(v, f"{where}.{key}", tensors, verb=verb) for key, v in value.items()}
        # Optimizers number their state: JSON has no such keys.
        return {
            _ITEMS: [
                [pack_tree(k, where, tensors, verb=verb), pack_tree(v, f"{where}.{k}", tensors, verb=verb)]
                for k, v in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        parts = [pack_tree(v, f"{where}.{i}", tensors, verb=verb) for i, v in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"Asked to {verb} {where}, which is a {type(value).__name__}. {verb.capitalize()} tensors, numbers, text, "
        "lists, tuples, dicts."
    )


def unpack_tree(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the tree that `pack_tree` took.

    Args:
        value: What `pack_tree` returned.
        tensors: The tensors, by name.
    """
    if isinstance(value, list):
        return [unpack_tree(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _ITEMS in value:
        return {unpack_tree(k, tensors): unpack_tree(v, tensors) for k, v in value[_ITEMS]}
    if _TUPLE in value:
        return tuple(unpack_tree(v, tensors) for v in value[_TUPLE])
    return {key: unpack_tree(v, tensors) for key, v in value.items()}
