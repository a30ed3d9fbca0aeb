"""Errors and warnings of a gradient reduction: which bucket, which parameter, what to do; `UnusedParameters`."""

from __future__ import annotations

import logging
from collections.abc import Collection
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


class UnusedParameters:
    """The parameters of one model that no rank has used yet, until its first step is over."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        """Those that no rank used in the first step, as far as it has come."""

        self.is_looking = True
        """Whether the first step is not over."""

        self._touched: set[str] = set()

    def look(self, unused: Collection[str], touched: set[str]) -> None:
        """Note a reduction; name what was not used once a parameter comes round again and shows that the step is over.

        Not at the first round: a re-entrant checkpoint has one of its own before the rest of the backward pass.

        Args:
            unused: Parameters that no rank used in it.
            touched: Those that this rank used.
        """
        if self._touched.isdisjoint(touched):
            self.names = tuple(name for name in unused if name in self.names or not self._touched)
            self._touched |= touched
            return
        self.is_looking = False
        if self.names:
            names = ", ".join(self.names[:8]) + (f" and {len(self.names) - 8} more" if len(self.names) > 8 else "")
            logger.warning("no rank used these parameters in the first step; they keep grad=None: %s", names)
