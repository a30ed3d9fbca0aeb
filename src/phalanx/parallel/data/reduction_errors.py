"""Errors of a gradient reduction, in words: which bucket, which parameter, what to do."""

from __future__ import annotations

import logging
from itertools import accumulate

import torch

from phalanx.comm.context import Context
from phalanx.errors import ConfigError, PeerLostError
from phalanx.parallel.data.bucket_buffers import Bucket
from phalanx.parallel.data.grad_reduction import WireOverflow
from phalanx.parallel.session import session

logger = logging.getLogger("phalanx.parallel")


def label_of(bucket: Bucket) -> str:
    """Return what a bucket holds, for a sentence."""
    names = [gradient.name for gradient in bucket.gradients]
    return f"the gradients of {' to '.join(dict.fromkeys((names[0], names[-1])))}" if names else "the buffers"


def check_overflow(bucket: Bucket, overflow: WireOverflow, label: str, context: Context) -> None:
    """Raise for a gradient that the wire cannot hold, unless a loss scale skips such steps. On all ranks alike.

    Args:
        bucket: What was added up.
        overflow: Where it is not finite.
        label: What the bucket holds.
        context: Of this rank.

    Raises:
        ConfigError: Names the parameter.
    """
    ends = accumulate(gradient.view.numel() for gradient in bucket.gradients)
    at = next((g for g, end in zip(bucket.gradients, ends, strict=True) if overflow.position < end), None)
    what = f"the gradient of {at.name!r}" if at is not None else f"a buffer beside {label}"
    most = torch.finfo(overflow.dtype).max
    if at is not None and at.param in session.loss_scaled:
        if context.rank == 0:
            logger.warning("%s, added up over the ranks, is above %g, the most float16 holds", what, most)
        return
    raise ConfigError(
        f"{what}, added up over the ranks in float16 (fp16_allreduce), is above {most:g}, the most that holds; on "
        "each rank it is finite. Set strategy.fp16_allreduce = False, or make it smaller: a lower learning rate, a "
        "mean in place of a sum in the loss."
    )


def peer_lost(error: RuntimeError, context: Context, step: int) -> PeerLostError:
    """Return an error for a reduction that failed, of a step counted from 1."""
    why = str(error).rstrip(".")
    return PeerLostError(
        f"rank {context.rank} of {context.world_size}: the all-reduce of gradients in step {step} failed: {why}. "
        "Another rank ended or stopped answering; its log says why."
    )
