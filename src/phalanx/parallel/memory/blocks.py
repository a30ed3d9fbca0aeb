"""`find_blocks`: the parts of a model that are worth computing again in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LEAST_RUN = 4
"""Layers of a sequence that are worth being cut into segments."""


@dataclass(frozen=True, slots=True)
class Block:
    """A module made of others; or a run of single layers in a sequence, `module[start:end]`."""

    name: str
    module: nn.Module
    run: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        """Return how a message names it."""
        where = self.name or type(self.module).__name__
        return where if self.run is None else f"{where}[{self.run[0]}:{self.run[1]}]"


def find_blocks(model: nn.Module) -> list[Block]:
    """Return the blocks of a model, in the order in which it lists them.

    Blocks are the members of its lists that are made of other modules (the layers of a transformer, the blocks of a
    ResNet), at whatever depth, and what stands beside them. A sequence of single layers is cut into about as many
    segments as each has layers (Chen et al., arXiv:1604.06174). A single layer is no block: computing it again would
    keep its inputs, which is what it keeps anyway.
    """
    return list(dict.fromkeys(_walk("", model, is_root=True)))


def inner_blocks(block: Block) -> list[Block]:
    """Return the blocks within a block."""
    if block.run is not None:
        return []
    children = [(f"{block.name}.{name}", child) for name, child in block.module.named_children()]
    return [inner for name, child in children for inner in _walk(name, child)]


def _walk(name: str, module: nn.Module, *, is_root: bool = False) -> Iterator[Block]:
    if isinstance(module, nn.Sequential) and not any(map(_is_composed, module)):
        yield from _segments(name, module)
    elif is_root or isinstance(module, _LISTS) or _holds_blocks(module):
        for child_name, child in module.named_children():
            yield from _walk(f"{name}.{child_name}" if name else child_name, child)
    elif _is_composed(module):
        yield Block(name, module)


def _is_composed(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _holds_blocks(module: nn.Module) -> bool:
    lists = (part for part in module.modules() if isinstance(part, _LISTS))
    return any(sum(_is_composed(member) for member in parent.children()) > 1 for parent in lists)


def _segments(name: str, sequence: nn.Sequential) -> Iterator[Block]:
    if len(sequence) < _LEAST_RUN or type(sequence).forward is not nn.Sequential.forward:
        return
    length, start = max(2, round(math.sqrt(len(sequence)))), 0
    while start < len(sequence):
        end = min(start + length, len(sequence))
        # What changes its input in place may not come first: the input is what a segment keeps.
        while end < len(sequence) and getattr(sequence[end], "inplace", False):
            end += 1
        yield Block(name, sequence, (start, end))
        start = end
