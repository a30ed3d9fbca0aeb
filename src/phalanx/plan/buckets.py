"""`cut_buckets`: gradient buckets: assign parameters to all-reduce buckets of about equal size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.mesh import reduced_along, rows_brought_along
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import AllReduce, Average, Plan, ReduceScatter, Update

MARK_BITS = 16
"""Bits of a bucket's number, sent with its gradients as two elements a bit (`parallel/data/bucket_buffers`)."""

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small so that communication starts early in the backward pass (the same figure as torch
DDP's)."""


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients that are reduced in one all-reduce."""

    params: tuple[ParamShape, ...]
    axes: tuple[str, ...]
    """Mesh axes along which they are added up."""

    update: AllReduce
    is_weighted: bool = False
    """Whether their layers weight them by rows: rows of several ranks come to a shard, as tokens to an expert."""

    @property
    def names(self) -> tuple[str, ...]:
        """Plain names of the parameters, in order of expected readiness."""
        return tuple(param.name for param in self.params)


def cut_buckets(params: Sequence[ParamShape], bucket_bytes: int) -> list[list[int]]:
    """Group parameters for the all-reduce, in the order in which their gradients become ready.

    Gradients appear roughly in reverse order of registration, so buckets are filled from the last parameter backwards.
    A bucket holds one dtype and is closed by the parameter that fills it.

    Args:
        params: Parameters in registration order.
        bucket_bytes: Bytes that close a bucket; the first bucket of a dtype closes at `FIRST_BUCKET_BYTES`.

    Returns:
        Lists of indices into `params`, each bucket in order of expected readiness.
    """
    buckets: list[list[int]] = []
    filling: dict[str, tuple[list[int], int]] = {}
    closed: set[str] = set()
    for index in reversed(range(len(params))):
        param = params[index]
        bucket, size = filling.get(param.dtype, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        size += param.bytes
        limit = bucket_bytes if param.dtype in closed else min(FIRST_BUCKET_BYTES, bucket_bytes)
        if size >= limit:
            closed.add(param.dtype)
            filling.pop(param.dtype, None)
        else:
            filling[param.dtype] = (bucket, size)
    return buckets


def all_reduce_buckets(plan: Plan, shape: ModelShape) -> list[GradientBucket]:
    """Return the buckets of a Plan's all-reduced gradients, in the order in which they are issued.

    Parameters with different all-reduce settings, or reduced along different axes, never share a bucket.
    """
    alike: dict[tuple[AllReduce, tuple[str, ...], bool], list[ParamShape]] = {}
    readers = math.prod(axis.size for axis in plan.mesh if axis.name in plan.step.batch_axes)
    has_all_replicas = plan.step.replicas is not None and readers == 1  # then they are added up all the same
    for param in shape.trainable:
        rule = plan.rule_for(param.name)
        axes, update = reduced_along(plan, rule), _all_reduce_of(rule.update)
        if update is None and has_all_replicas and plan.world_size == 1 and isinstance(rule.update, ReduceScatter):
            update = AllReduce(reduce=rule.update.reduce)  # nothing is sharded
        if update is not None and (axes or has_all_replicas):
            is_weighted = bool(rows_brought_along(plan, rule))
            alike.setdefault((update, axes, is_weighted), []).append(param)
    return [
        GradientBucket(tuple(params[i] for i in bucket), axes, update, is_weighted)
        for (update, axes, is_weighted), params in alike.items()
        for bucket in cut_buckets(params, update.bucket_bytes)
    ]


def _all_reduce_of(update: Update) -> AllReduce | None:
    """Return how gradients are averaged; ranks that take local steps later average them at first."""
    if isinstance(update, Average) and update.begin_step > 1:
        return AllReduce(reduce=update.reduce)
    return update if isinstance(update, AllReduce) else None
