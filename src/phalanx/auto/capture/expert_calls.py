"""`read_expert_call`: the experts of a mixture in a captured step, one operator with the work of the tokens it gets.

Which expert gets which token is known only when a model runs, so experts ask for values, and a capture makes up that
each gets all tokens. What they compute is known all the same: a token meets the experts that were chosen for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor, nn

from phalanx.auto.capture.graph import ExpertCall, Operator
from phalanx.parallel.tensor.expert_modules import holds_experts, is_expert_call

ExpertCalls: TypeAlias = dict[tuple[str, int], ExpertCall]
"""By path of the module, and which call of it."""


def read_expert_call(module: nn.Module, inputs: Sequence[object]) -> ExpertCall | None:
    """Return what a module computes that holds experts and is called as style `expert` needs it; None of others."""
    if not is_expert_call(inputs) or not holds_experts(module):
        return None
    tokens, chosen, weights = (x for x in inputs if isinstance(x, Tensor))
    stacked = [tuple(param.shape) for param in module.parameters()]
    return ExpertCall(
        experts=stacked[0][0],
        copies=chosen.numel(),
        token_bytes=tokens.shape[1] * tokens.element_size(),
        weight_bytes=weights.element_size(),
        matrices=tuple((shape[1], math.prod(shape[2:])) for shape in stacked if len(shape) > 2),
    )


def count_chosen_tokens(
    operators: Iterable[Operator], calls: Mapping[tuple[str, int], ExpertCall]
) -> Iterator[Operator]:
    """Yield operators, those of experts with as many tokens as were chosen for them.

    Args:
        operators: Of a whole step; each call of experts is one of its forward pass.
        calls: What experts compute.
    """
    repeats: dict[tuple[str, int], float] = {}
    for operator in operators:
        key = operator.module, operator.call
        call = calls.get(key)
        if call is None:
            yield operator
            continue
        times = repeats.setdefault(key, max(1.0, operator.flops / max(1, call.flops)))
        yield replace(
            operator,
            flops=round(operator.flops / times),
            read_bytes=round(operator.read_bytes / times),
            written_bytes=round(operator.written_bytes / times),
            saved_bytes=round(operator.saved_bytes / times),
            returned_bytes=round(operator.returned_bytes / times),
            returned_saved_bytes=round(operator.returned_saved_bytes / times),
            temporary_bytes=round(operator.temporary_bytes / times),
            experts=call if operator.phase == "forward" else None,
        )
