"""`check_runs_in_parts`: whether a model's code runs where several ranks share the sequence of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from phalanx.auto.capture.fake_copy import copy_parts
from phalanx.auto.capture.sequence_blocks import SequenceBlocks
from phalanx.auto.shape_check import find_failure, on_meta
from phalanx.data.loader.binding import LossFunction

_TOKENS = -2


def check_runs_in_parts(
    model: nn.Module, sample: Any, loss_fn: LossFunction | None, blocks: SequenceBlocks, ranks: int
) -> str | None:
    """Return why a model fails if so many ranks share the sequence of its blocks; None if it runs.

    Args:
        model: The whole model; not changed.
        sample: As `capture` takes it.
        loss_fn: As `capture` takes it.
        blocks: Of the model.
        ranks: How many, which divide its tokens.
    """
    narrow, batch, loss = copy_parts((model, sample, loss_fn), on_meta)
    members = list(narrow.get_submodule(blocks.path).children())
    for member in members:
        member.register_forward_pre_hook(partial(_cut_tokens, blocks.tokens, ranks), with_kwargs=True)
    members[-1].register_forward_hook(partial(_put_together, ranks))
    with _AttentionOfParts():
        error = find_failure(narrow, batch, loss)
    return None if error is None else str(error).partition("\n")[0] or type(error).__name__


class _AttentionOfParts(TorchFunctionMode):
    """Attention to as many keys as there are queries, as it meets those of others another way; masks are whole."""

    def __torch_function__(self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        others = {name: value for name, value in (kwargs or {}).items() if name not in ("attn_mask", "dropout_p")}
        return func(*args[:3], **others)


def _cut_tokens(
    tokens: int, ranks: int, member: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, Any]:
    def part_of(x: Tensor) -> Tensor:
        return x.narrow(_TOKENS, 0, tokens // ranks) if x.dim() > 1 and x.shape[_TOKENS] == tokens else x

    return tree_map_only(Tensor, part_of, inputs), tree_map_only(Tensor, part_of, dict(named))


def _put_together(ranks: int, member: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise TypeError(f"its blocks return {type(output).__name__}, not one tensor")
    return torch.cat([output] * ranks, _TOKENS)
