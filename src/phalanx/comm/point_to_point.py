"""`send` and `recv` with autograd: the backward pass sends the gradient the other way.

    forward   backward
    send      receives the gradient of what was sent
    recv      sends the gradient of what was received

Both ranks run a backward pass, and each must reach its end of every message: `send` returns a zero to add to the loss,
so that the sender's backward waits for the gradient. Messages between two ranks match in order; the backward pass takes
them in the opposite order, as autograd runs what was computed last first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import transfers
from phalanx.comm.collectives import apply_function, ranks_of
from phalanx.comm.groups import Group
from phalanx.errors import ConfigError


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dst: int, group: Group) -> Tensor:
        ctx.like, ctx.dst, ctx.group = x.detach().new_empty(()).expand(x.shape), dst, group
        transfers.send(x, dst, x.requires_grad, group)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return transfers.recv_like(ctx.like, ctx.dst, ctx.group), None, None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: Tensor, src: int, group: Group) -> Tensor:
        ctx.src, ctx.group = src, group
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        transfers.send_values(grads[0], ctx.src, ctx.group)
        return None, None, None, None


def send(x: Tensor, dst: int, *, group: Group = None, axis: str | None = None) -> Tensor:
    """Send a tensor to one rank, which calls `recv`.

    Blocks until it is on its way. Gradient: what the receiver's backward sends; the receiver's backward pass must run
    then, unless `x` requires no gradient.

    Args:
        x: Tensor of up to 8 dims. Not modified.
        dst: Rank within the group that receives.
        group: Ranks among which `dst` counts; all when omitted.
        axis: The same by the name of a mesh axis.

    Returns:
        A zero of the dtype of `x`: add it to the loss, so that this rank's backward pass fetches the gradient.

    Raises:
        ConfigError: If `dst` is this rank or none of the group.
        PeerLostError: If the other rank was lost.
    """
    group = _with_peer("send", dst, group, axis)
    return apply_function(_Send, x if torch.is_grad_enabled() else x.detach(), dst, group)


def recv(src: int, *, device: torch.device | str = "cpu", group: Group = None, axis: str | None = None) -> Tensor:
    """Receive the tensor that one rank sends by `send`; shape and dtype travel with it.

    Blocks until it is here. Gradient: travels back to the sender; the result requires one when what was sent does.

    Args:
        src: Rank within the group that sends.
        device: Where the tensor shall be.
        group: Ranks among which `src` counts; all when omitted.
        axis: The same by the name of a mesh axis.

    Raises:
        ConfigError: If `src` is this rank or none of the group.
        PeerLostError: If the other rank was lost.
    """
    group = _with_peer("recv", src, group, axis)
    received, requires_grad = transfers.recv(src, torch.device(device), group)
    if not (requires_grad and torch.is_grad_enabled()):
        return received
    anchor = torch.empty((), requires_grad=True)  # Without an input that requires a gradient there is no backward.
    return apply_function(_Recv, anchor, received, src, group)


def _with_peer(verb: str, peer: int, group: Group, axis: str | None) -> Group:
    group, size = ranks_of(group, axis, verb)
    me = dist.get_rank(group) if size > 1 else 0
    if peer == me or not 0 <= peer < size:
        raise ConfigError(
            f"{verb} on rank {me} of {size} needs another rank of the group, found {peer}. Give one from 0 to "
            f"{size - 1} that is not this rank."
        )
    return group
