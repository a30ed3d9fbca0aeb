"""`shard_experts`: each rank holds some of the experts of a layer, and tokens travel to theirs and back.

Ranks read rows of their own. A rank sorts its tokens by expert, one all-to-all takes each to the rank that holds its
expert, that rank computes, and another all-to-all takes the results back (Lepikhin et al., GShard, arXiv:2006.16668).
No expert has a capacity: messages are as long as the router makes them, and no token is dropped.

An expert sees tokens of all ranks, so its gradient has a term from each rank's loss. Terms are weighted by the rows of
the rank that they come from, where its results arrive; data parallel weighs those of all other parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm import collectives, context, transfers
from phalanx.comm.groups import Group
from phalanx.errors import ConfigError
from phalanx.parallel.data.forward_hooks import Forward, wrap_forward
from phalanx.parallel.data.sample_weights import row_weight, with_gradient_times
from phalanx.parallel.tensor.expert_modules import is_expert_call
from phalanx.parallel.tensor.shard_spec import ShardSpec


def shard_experts(name: str, module: nn.Module, spec: ShardSpec, *, is_sum: bool) -> None:
    """Let a module compute with the experts of this rank, in place.

    Args:
        name: Its plain name.
        module: A module that `holds_experts`, whose parameters are those of this rank already. Called with tokens
            (rows, width), the experts chosen for each (rows, k) and their weights (rows, k), it returns (rows, width).
            Where it has `num_experts`, that becomes the number of experts here.
        spec: How experts are dealt to the ranks of a group.
        is_sum: Whether gradients are summed over the ranks, not averaged.
    """
    if getattr(module, "num_experts", None) == sum(spec.sizes):
        module.num_experts = spec.mine  # type: ignore[assignment]  # a plain number
    # How long messages are depends on the tokens at hand, which is not for a compiled graph.
    wrap_forward(module, torch.compiler.disable(_computed), ExpertShard(name, module, spec, is_sum))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertShard:
    """The experts that this rank holds of a module. Collective over the group, forward and backward."""

    path: str
    module: nn.Module
    spec: ShardSpec
    is_sum: bool

    def compute(self, forward: Forward, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return what the experts of all ranks make of this rank's tokens, shape (rows, width)."""
        route = self._route(chosen)
        copies = self._leaving(tokens).index_select(0, route.order // chosen.shape[1])
        scales = self._leaving(weights).flatten().index_select(0, route.order)
        dispatched: tuple[Tensor, Tensor] = _Dispatch.apply(copies, scales, route, self.spec.group)  # type: ignore[no-untyped-call]
        result = self._results(forward, *dispatched, route)
        back = collectives.all_to_all(result, sizes=route.received, arriving=route.sent, group=self.spec.group)
        by_token = back.index_select(0, route.order.argsort()).view(*chosen.shape, tokens.shape[1])
        return with_gradient_times(by_token.sum(1), self._row_weight)

    def _route(self, chosen: Tensor) -> Route:
        """Return where this rank's tokens go, and what comes here. Collective.

        Raises:
            ConfigError: If an expert was chosen that does not exist.
        """
        flat, sizes, ranks = chosen.flatten(), list(self.spec.sizes), len(self.spec.sizes)
        counts = flat.bincount(minlength=sum(sizes))
        if len(counts) > sum(sizes):
            raise ConfigError(
                f"{self.path!r} has {sum(sizes)} experts, and its router chose number {len(counts) - 1}. Give it "
                "numbers from 0, and a router with as many outputs as there are experts."
            )
        everyone = torch.stack(transfers.all_gather(counts, 0, [len(counts)] * ranks, self.spec.group))
        arriving = self.spec.part(everyone, 1)
        experts = torch.arange(self.spec.mine, device=chosen.device).repeat(ranks).repeat_interleave(arriving.flatten())
        sent = [int(part.sum()) for part in counts.cpu().split(sizes)]
        return Route(flat.argsort(stable=True), sent, arriving.sum(1).tolist(), experts)

    def _results(self, forward: Forward, tokens: Tensor, scales: Tensor, route: Route) -> Tensor:
        """Return what this rank's experts make of the tokens that arrived.

        Raises:
            ConfigError: If the module returns something else than a row for each token.
        """
        if not len(tokens):  # the backward pass comes here all the same: other ranks wait for its messages
            return collectives.apply_function(_NoTokens, tokens, scales, *self.module.parameters())
        result = forward(tokens, route.experts[:, None], scales[:, None])
        if not isinstance(result, Tensor) or result.shape != tokens.shape:
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ConfigError(
                f"{self.path!r} holds experts and returns {shape} for tokens of shape {tuple(tokens.shape)}. Return "
                "one row for each token: the sum over its experts of weight times output."
            )
        return result.to(tokens.dtype)  # autocast may make another, and a rank without tokens would not know

    def _leaving(self, x: Tensor) -> Tensor:
        """Return `x`; the gradient that leaves through it is as data parallel weights, of no row it is zero."""
        return with_gradient_times(x, lambda: 1 / (self._row_weight() or 1.0))

    def _row_weight(self) -> float:
        """Return how much this rank's rows weigh in the backward pass that runs; 1 for an even share."""
        process = context.current()
        return row_weight(process, process.readers, is_sum=self.is_sum)


@dataclass(frozen=True, slots=True)
class Route:
    """Where the copies of a rank's tokens go, one for each expert that was chosen for a token."""

    order: Tensor
    """Numbers of the copies, token by token, sorted by expert: (rows * k,)."""

    sent: list[int]
    """Copies for each rank."""

    received: list[int]
    """Copies from each rank."""

    experts: Tensor
    """The expert of each copy that arrives, counted from 0 on this rank: (copies,)."""


def _computed(forward: Forward, part: ExpertShard, *inputs: Any, **named: Any) -> Tensor:
    """Compute in place of a module's forward pass.

    Raises:
        ConfigError: If it was not called with tokens, chosen experts and weights.
    """
    if named or not is_expert_call(inputs):
        shapes = [tuple(x.shape) for x in inputs if isinstance(x, Tensor)]
        raise ConfigError(
            f"{part.path!r} holds experts and was called with shapes {shapes} and {sorted(named) or 'no'} keywords. "
            "Call it with tokens (rows, width), the numbers of their experts (rows, k) and weights (rows, k), in "
            "this order: experts(x.flatten(0, -2), chosen, weights)."
        )
    return part.compute(forward, *inputs)


class _Dispatch(torch.autograd.Function):
    """Take copies of tokens and their weights to the experts; gradients of both come back in one order on all ranks."""

    @staticmethod
    def forward(ctx: Any, copies: Tensor, scales: Tensor, route: Route, group: Group) -> tuple[Tensor, Tensor]:
        ctx.route, ctx.group = route, group
        return _move(copies, route, group), _move(scales, route, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sizes, arriving = ctx.route.received, ctx.route.sent
        moved = (
            collectives.all_to_all(grad, sizes=sizes, arriving=arriving, group=ctx.group) if is_needed else None
            for grad, is_needed in zip(grads, ctx.needs_input_grad, strict=False)
        )
        return *moved, None, None


def _move(x: Tensor, route: Route, group: Group) -> Tensor:
    return transfers.all_to_all(x, transfers.known_exchange(x, 0, 0, route.sent, route.received, group), group)


class _NoTokens(torch.autograd.Function):
    """The result of no tokens: all that experts would have used has a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *used: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, *used)
        return tokens.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        is_needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(x) if needs else None for x, needs in is_needed)
