"""`put_gradient`: copy gradients and buffers of a model into a bucket before it is reduced, and out of it after."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.parallel.data.bucket_buffers import Bucket, Gradient, SyncedBuffer, require_same_kind


@torch.no_grad()
def put_gradient(gradient: Gradient, scale: float) -> None:
    """Move the gradient of a parameter into its bucket, times a factor; it lies there from now on."""
    require_same_kind(gradient)
    grad = gradient.param.grad
    assert grad is not None
    if grad.data_ptr() == gradient.view.data_ptr():
        gradient.view.mul_(scale)
    else:
        torch.mul(grad, scale, out=gradient.view)
        gradient.param.grad = gradient.view


def put_buffers(carried: Sequence[SyncedBuffer], weight: float, *, is_first: bool) -> None:
    """Put the buffers that ride in a bucket there.

    Args:
        carried: The buffers.
        weight: What this rank's count for in those that are averaged.
        is_first: Whether this rank's are what all get of the others.
    """
    for item in carried:
        factor = weight if item.averaged else float(is_first)
        buffer = item.live_buffer()
        if factor and buffer is not None:
            torch.mul(buffer, factor, out=item.view)
        else:
            item.view.zero_()


def take_back(bucket: Bucket) -> list[str]:
    """Give every parameter its reduced gradient, and the model its buffers; return the parameters that nobody used."""
    # Where no parameter is missing, looking would only make the host wait for a card.
    used_somewhere = bucket.flags.tolist() if bucket.pending else None
    unused = []
    for position, gradient in enumerate(bucket.gradients):
        if used_somewhere is not None and not used_somewhere[position]:
            unused.append(gradient.name)
            continue
        gradient.param.grad = gradient.view
    for item in bucket.carried:
        buffer = item.live_buffer()
        if buffer is not None:
            # .data leaves the version counter alone: a graph that saved the buffer can still be walked.
            buffer.data.copy_(item.view)
    return unused
