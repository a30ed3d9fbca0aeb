"""Which gradients travel together: cut parameters into buckets of about equal bytes."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import AllReduce, Plan

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small so that communication starts early in the backward pass (the same figure as torch
DDP's)."""


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


def all_reduce_buckets(plan: Plan, shape: ModelShape) -> list[list[ParamShape]]:
    """Return the buckets in which a Plan's all-reduced gradients travel, in the order in which they are issued.

    Parameters with different all-reduce settings never share a bucket.
    """
    by_update: dict[AllReduce, list[ParamShape]] = {}
    for param in shape.trainable:
        rule = plan.rule_for(param.name)
        if isinstance(rule.update, AllReduce) and rule.managed == "phalanx":
            by_update.setdefault(rule.update, []).append(param)
    return [
        [params[i] for i in bucket]
        for update, params in by_update.items()
        for bucket in cut_buckets(params, update.bucket_bytes)
    ]
