"""`inner`: parameter names without wrapper prefixes (DDP, torch.compile), and errors for names that do not match."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from phalanx.errors import ConfigError, did_you_mean

_T = TypeVar("_T")

_COMPILED, _CHECKPOINTED = "_orig_mod", "_checkpoint_wrapped_module"
_SHOWN = 12


def inner(model: nn.Module) -> nn.Module:
    """Return a model without its wrappers."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif _COMPILED in model._modules or _CHECKPOINTED in model._modules:
            model = getattr(model, _COMPILED if _COMPILED in model._modules else _CHECKPOINTED)
        else:
            return model


def without_wrappers(name: str) -> str:
    """Return a name without the parts that torch.compile and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in (_COMPILED, _CHECKPOINTED))


def strip_prefixes(state: Mapping[str, _T], names: Collection[str]) -> tuple[dict[str, _T], list[str]]:
    """Return a state dict of any framework under the names of a plain model, and the prefixes that were removed.

    Args:
        state: The state dict.
        names: Names of the plain model.
    """
    plain = {without_wrappers(name): value for name, value in state.items()}
    taken = [f"{_COMPILED}."] if any(_COMPILED in name.split(".") for name in state) else []
    while plain and all(name.startswith("module.") for name in plain) and not plain.keys() & set(names):
        plain = {name.removeprefix("module."): value for name, value in plain.items()}
        taken.append("module.")
    return plain, list(dict.fromkeys(taken))


def check_names(what: str, expected: Iterable[str], names: Iterable[str], source: object) -> None:
    """Raise unless a checkpoint has exactly the expected names.

    Args:
        what: What is named ("parameters of the model").
        expected: Names the job has.
        names: Names the checkpoint has.
        source: The checkpoint, for the message.

    Raises:
        ConfigError: If names are missing or left over; lists them.
    """
    ours, saved = set(expected), set(names)
    missing, extra = sorted(ours - saved), sorted(saved - ours)
    if not missing and not extra:
        return
    lines = [f"{source} does not fit: {what} differ."]
    if missing:
        lines.append(f"Missing in the checkpoint: {_join_names(missing)}.{did_you_mean(missing[0], extra)}")
    if extra:
        lines.append(f"Only in the checkpoint: {_join_names(extra)}.")
    raise ConfigError(" ".join(lines) + " Build the model and optimizer that were saved.")


def _join_names(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
