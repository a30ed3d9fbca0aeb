"""Share of parameters and multiply-adds by kind of layer, for `explain`.

Layers with few parameters and much to compute are cheap to replicate, since little travels for them; those with many
parameters and little to compute are cheap to cut, since their activations are small (Krizhevsky, arXiv:1404.5997).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table as Grid


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One kind of layers of a model."""

    kind: str
    parameters: int
    multiplications: int
    """Of one forward pass, over the rows that were measured."""


def combined(layers: Iterable[LayerKind]) -> tuple[LayerKind, ...]:
    """Return one entry for each kind, in order of first appearance."""
    kinds: dict[str, LayerKind] = {}
    for layer in layers:
        before = kinds.get(layer.kind, LayerKind(layer.kind, 0, 0))
        kinds[layer.kind] = LayerKind(
            layer.kind, before.parameters + layer.parameters, before.multiplications + layer.multiplications
        )
    return tuple(kinds.values())


def fractions(kinds: Sequence[LayerKind]) -> dict[str, dict[str, float]]:
    """Return each kind's part of all parameters and of all multiplications, from 0 to 1."""
    parameters, computed = (sum(getattr(k, name) for k in kinds) or 1 for name in ("parameters", "multiplications"))
    return {k.kind: {"parameters": k.parameters / parameters, "compute": k.multiplications / computed} for k in kinds}


def fractions_table(kinds: Sequence[LayerKind]) -> Grid:
    """Return the fractions as a table."""
    grid = Grid(title="Layers", title_justify="left")
    for name in ("kind", "elements", "of all parameters", "of all compute"):
        grid.add_column(name, justify="left" if name == "kind" else "right")
    parts = fractions(kinds)
    for kind in kinds:
        part = parts[kind.kind]
        grid.add_row(kind.kind, f"{kind.parameters:,}", f"{part['parameters']:.1%}", f"{part['compute']:.1%}")
    return grid
