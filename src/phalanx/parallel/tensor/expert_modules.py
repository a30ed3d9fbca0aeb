"""Which modules style `expert` is for, and how they are called. Needs torch alone, as planners ask too."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

EXPERTS_KIND = (
    "a module whose parameters are those of all experts, stacked: (experts, outputs, inputs); experts in an "
    "nn.ModuleList have to become one such module"
)
"""What style `expert` is for, as the end of a sentence."""


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module's parameters are those of its experts, stacked: (experts, ...), one of them matrices."""
    own = list(module.parameters(recurse=False))
    is_all = len(own) == len(list(module.parameters()))
    return is_all and max((p.dim() for p in own), default=0) >= 3 and len({p.shape[:1] for p in own}) == 1


def is_expert_call(inputs: Sequence[object]) -> bool:
    """Return whether a module is called with tokens (rows, width), experts chosen (rows, k) and weights (rows, k)."""
    shapes = [tuple(x.shape) for x in inputs if isinstance(x, Tensor)]
    fits = len(shapes) == len(inputs) == 3 and all(len(shape) == 2 for shape in shapes)
    return fits and shapes[1] == shapes[2] and shapes[0][0] == shapes[1][0]
