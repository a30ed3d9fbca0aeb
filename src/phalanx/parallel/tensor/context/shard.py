"""`shard_sequence`: context parallel: a module's sequence dim over ranks, with attention over all tokens.

Tokens are cut before a named module and put together behind it, so that embeddings, positions, heads and losses see
whole sequences. Inside, a rank's queries meet the keys and values of all ranks (`sequence_attention`). A rank has a
chunk of the beginning of the sequence and one of its end (`ShardSpec.zigzag`), so that causal attention is as much work
for every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.data.forward_hooks import Forward, wrap_forward
from phalanx.parallel.tensor.context.attention import TOKENS, SequenceAttention, deal_tokens
from phalanx.parallel.tensor.layers.dropout import drop_part
from phalanx.parallel.tensor.mappings import copy_to, gather_from, scatter_to
from phalanx.parallel.tensor.shard_spec import ShardSpec
from phalanx.plan.styles import ContextAttention

_MIXING = (nn.MultiheadAttention, nn.RNNBase, nn.BatchNorm1d)
"""Modules that mix tokens, or take their statistics, another way than by attention that comes here."""


def check_context(model: nn.Module, named: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise unless these modules of a model can compute parts of a sequence, as far as can be seen.

    Raises:
        PlanError: If one is in another, has no forward pass, mixes tokens in a way that is known not to come here, or
            shares a parameter with modules that see whole sequences.
    """
    inside: dict[int, str] = {}
    within: set[int] = set()
    for name, module in named:
        idle = next((member for member in _members(module) if type(member).forward is nn.Module.forward), None)
        if idle is not None:
            raise PlanError(
                f"modules[{name}] has style 'context', and a {type(idle).__name__} there has no forward pass that "
                "could compute a part of the sequence. Name its members."
            )
        for own, member in module.named_modules():
            full = f"{name}.{own}".strip(".")
            if id(member) in within:
                raise PlanError(f"modules[{full}] is in two modules with style 'context'. Name one of them.")
            within.add(id(member))
            if isinstance(member, _MIXING) or (isinstance(member, nn.Conv1d) and member.kernel_size != (1,)):
                raise PlanError(
                    f"modules[{name}] has style 'context', and {full!r} in it ({type(member).__name__}) mixes tokens, "
                    "of which each rank would have some. Attention by torch.nn.functional.scaled_dot_product_attention "
                    "sees all."
                )
        inside |= {id(param): name for param in module.parameters()}
    for name, module in model.named_modules() if inside else ():
        for own, param in module.named_parameters(recurse=False):
            if id(module) not in within and id(param) in inside:
                raise PlanError(
                    f"modules[{inside[id(param)]}] has style 'context' and shares a parameter with {name!r} ({own}), "
                    "which sees whole sequences: their gradients do not add up. Leave it out, or untie them."
                )


def shard_sequence(
    name: str, module: nn.Module, dim: int, group: ShardSpec, ranks: int, way: ContextAttention = "all_gather"
) -> SequenceShard:
    """Let a module compute this rank's part of the sequence, in place.

    Args:
        name: Its plain name.
        module: The module. A list of modules, or a chain of them, stands for its members, one after another: the
            sequence is cut before the first and put together behind the last.
        dim: Dim of activations that is the sequence.
        group: Names the ranks, and this rank's place among them.
        ranks: How many there are.
        way: How keys and values reach other ranks.

    Returns:
        What is in force while it runs.
    """
    part = SequenceShard(name, dim, replace(group, sizes=(1,) * ranks), way)
    wrap_members(module, part)
    return part


def wrap_members(module: nn.Module, part: SequenceShard) -> None:
    """Run a module, or the members of a list, with what is in force on a part of a sequence, in place."""
    around, members = torch.compiler.disable(_computed), _members(module)  # messages between ranks do not compile
    for index, member in enumerate(members):
        wrap_forward(member, around, part, index == 0, index == len(members) - 1)


def _members(module: nn.Module) -> list[nn.Module]:
    """Return the modules that compute: of a list or a chain, whose loop may be elsewhere, its members."""
    is_list = isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward
    return list(module.children()) if is_list else [module]


class SequenceShard(TorchFunctionMode):
    """In force while this rank computes its part of a sequence: attention meets all keys, dropouts draw all masks.

    Nothing of torch is altered; calls of `F.scaled_dot_product_attention` and `F.dropout` come here because the mode is
    entered. Collective over the group.
    """

    def __init__(self, name: str, dim: int, spec: ShardSpec, way: ContextAttention) -> None:
        super().__init__()
        self._name, self._dim, self._spec, self._way = name, dim, spec, way
        self._attention = SequenceAttention(spec, way, self._error)
        self._lengths: set[int] = set()
        self._tokens = 0
        self._met_attention = False

    def __deepcopy__(self, _: dict[int, Any]) -> SequenceShard:
        return SequenceShard(self._name, self._dim, self._spec, self._way)

    def __torch_function__(self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what torch would, but for attention and dropouts.

        Raises:
            ConfigError: If a module counts its part's tokens from 0, for positions or rows of a table.
        """
        if func is F.scaled_dot_product_attention:
            self._met_attention = True
            return self._attention(*args, **(kwargs or {}))
        if func is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        is_count = func is torch.arange and len(result) == self._tokens
        if is_count or (func is Tensor.__getitem__ and self._is_beginning(*args)):
            raise self._error(
                f"counts its {self._tokens} tokens from 0 ({func.__name__}), though they are of another place on each "
                "rank. Make positions and tables outside of it, for whole sequences, and pass them in"
            )
        return result

    def enter(self, args: Any, named: Any, *, is_cut: bool) -> tuple[Any, Any, ShardSpec]:
        """Return a module's inputs with this rank's part of what has a sequence, and how that is cut.

        Raises:
            ConfigError: If the first input is no activation that can be cut.
        """
        x, ranks = args[0] if args else None, len(self._spec.sizes)
        if not isinstance(x, Tensor) or not -x.dim() <= self._dim < x.dim():
            kind = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise self._error(f"takes as its first input the activations, whose dim {self._dim} is cut; found {kind}")
        length = x.shape[self._dim] * (ranks if is_cut else 1)
        if is_cut and length not in self._lengths:
            raise self._error(
                f"got {x.shape[self._dim]} tokens, which no member before it cut. Let forward run all members in "
                "order, or name each of them, which cuts and puts together at each"
            )
        if length % ranks:
            raise self._error(
                f"got a sequence of {length}, which cannot be cut evenly over {ranks} ranks. Pad it to a multiple of "
                f"{ranks}"
            )
        self._lengths.add(length)
        self._tokens = length // ranks
        spec = deal_tokens(self._spec, length // ranks)

        def mine(value: Tensor) -> Tensor:
            if value is x and is_cut:
                return x
            if x.dim() > 2 and tuple(value.shape) == (length, length) and self._has_rows(x, length):
                raise self._error(
                    f"got an input of shape {tuple(value.shape)}, and as many rows as tokens: a mask is to be cut, "
                    "something of each row is not. Use another number of rows, or give it another dim"
                )
            if -value.dim() <= self._dim < value.dim() and value.shape[self._dim] == length:
                return self._scatter(value, self._dim % value.dim(), spec)
            return self._copy(value, spec) if value.requires_grad else value

        return tree_map_only(Tensor, mine, args), tree_map_only(Tensor, mine, named), spec

    def look(self, model: nn.Module, _inputs: Any, _output: Any) -> None:
        """Raise if the module did not run as a whole; a hook behind the model, whose gradients would be wrong.

        Raises:
            ConfigError: On all ranks alike.
        """
        if model.training and not self._lengths and not torch.compiler.is_compiling():
            raise self._error("did not run, or its parts ran without it. Name the modules that the forward pass calls")

    def leave(self, output: Any, spec: ShardSpec) -> Tensor:
        """Return the whole of what a module gave for this rank's part.

        Raises:
            ConfigError: If it is no such part, or nothing that is known mixed tokens inside.
        """
        if not self._met_attention:
            raise self._error(
                "called no torch.nn.functional.scaled_dot_product_attention, and other ways to mix tokens would see a "
                "part of them. Let attention call it, or leave style context out"
            )
        is_part = isinstance(output, Tensor) and -output.dim() <= self._dim < output.dim()
        if not is_part or output.shape[self._dim] != spec.mine:
            kind = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise self._error(
                f"must return one tensor with the {spec.mine} tokens it got along dim {self._dim}; found {kind}"
            )
        return self._gather(output, self._dim % output.dim(), spec)

    def _scatter(self, value: Tensor, dim: int, spec: ShardSpec) -> Tensor:
        return scatter_to(value, dim, spec)

    def _copy(self, value: Tensor, spec: ShardSpec) -> Tensor:
        return copy_to(value, spec.group)

    def _gather(self, output: Tensor, dim: int, spec: ShardSpec) -> Tensor:
        return gather_from(output, dim, spec)

    def _has_rows(self, x: Tensor, count: int) -> bool:
        return len(x) == count

    def _is_beginning(self, tensor: Tensor, index: Any) -> bool:
        """Return whether an index takes as many of the first rows of a longer table as there are tokens here."""
        for dim, taken in enumerate(index if isinstance(index, tuple) else (index,)):
            if taken is None or taken is Ellipsis:
                return False  # further dims are not known
            first = taken.stop if isinstance(taken, slice) and not taken.start else None
            if isinstance(first, int) and first == self._tokens < tensor.shape[dim]:
                return True
        return False

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"module {self._name!r} has style 'context' and {what}.")

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0 or input.dim() < 2:
            return F.dropout(input, p, training, inplace)
        return self._drop(input, p)

    def _drop(self, input: Tensor, p: float) -> Tensor:
        return drop_part(input, p, TOKENS, deal_tokens(self._spec, input.shape[TOKENS]))


_in_force: ContextVar[SequenceShard | None] = ContextVar("phalanx_part_of_a_sequence", default=None)


def active_sequence_shard() -> AbstractContextManager[Any]:
    """Return what lets modules compute again, in the backward pass, on the part of a sequence they compute now."""
    return _in_force.get() or nullcontext()


def _computed(forward: Forward, part: SequenceShard, is_first: bool, is_last: bool, *args: Any, **named: Any) -> Any:
    args, named, spec = part.enter(args, named, is_cut=not is_first)
    before = _in_force.set(part)
    try:
        with part:
            output = forward(*args, **named)
    finally:
        _in_force.reset(before)
    return part.leave(output, spec) if is_last else output
