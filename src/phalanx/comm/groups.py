"""Process groups of subsets of ranks, cached: `new_group`, and the groups along mesh axes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch.distributed as dist

from phalanx.comm import process_group
from phalanx.comm.agreement import agree
from phalanx.comm.waits.timeouts import collective_timeout
from phalanx.errors import ConfigError, did_you_mean

logger = logging.getLogger("phalanx.comm")

Group: TypeAlias = dist.ProcessGroup | None
"""Ranks that take part in a collective; None means all."""

_LOOP_AFTER = 3
"""Requests for one group after which they look like a loop."""


class _Made:
    """The groups of the present default group, by their ranks."""

    def __init__(self) -> None:
        self.default: object = None
        self.groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self.requests: dict[tuple[int, ...], int] = {}
        self.axes: dict[str, tuple[Group, int]] = {}

    def follow(self, default: object) -> None:
        """Forget groups of a default group that has ended."""
        if self.default is not default:
            self.default = default
            self.groups.clear()
            self.requests.clear()
            self.axes.clear()


_made = _Made()


def new_group(ranks: Sequence[int], *, backend: str | None = None) -> Group:
    """Return the group of these ranks, made at the first request and kept.

    Collective over *all* ranks of the job, members or not, in the same order. Only members may use it: a collective of
    ours on a rank outside raises instead of quietly leaving the tensor as it is.

    Args:
        ranks: Global ranks, in any order; ranks inside the group are numbered in ascending order.
        backend: torch backend; that of the job when omitted.

    Returns:
        The group, or None in a job of one process.

    Raises:
        ConfigError: If a rank does not exist or is named twice, or ranks ask for groups in different orders.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    key = tuple(sorted(ranks))
    if not key or len(set(key)) != len(key) or not 0 <= key[0] <= key[-1] < size:
        raise ConfigError(
            f"new_group needs different ranks between 0 and {size - 1}, found {list(ranks)}. Correct them."
        )
    if not dist.is_initialized():
        return None
    _made.follow(dist.group.WORLD)
    _warn_in_a_loop(key)
    if (key, "") not in _made.groups and process_group.has_met():
        agree("the ranks of new_group", list(key))  # Else ranks would wait for each other in different groups.
    return _make(key, backend)


def group_of(parts: Sequence[Sequence[int]], purpose: str = "") -> Group:
    """Return the group of this rank's part of the ranks, made at the first request and kept.

    Collective over *all* ranks of the job.

    Args:
        parts: Groups of global ranks in ascending order, each rank in one of them; the same on every rank.
        purpose: Calls of different purposes have groups of their own, and need no order among each other.
    """
    if not dist.is_initialized():
        return None
    _made.follow(dist.group.WORLD)
    groups = {tuple(part): _make(tuple(part), None, purpose) for part in parts}
    return next(group for part, group in groups.items() if dist.get_rank() in part)


def _make(key: tuple[int, ...], backend: str | None, purpose: str = "") -> dist.ProcessGroup:
    if (key, purpose) not in _made.groups:
        _made.groups[key, purpose] = dist.new_group(list(key), backend=backend, timeout=collective_timeout())
        if dist.get_rank() in key:
            ring = len(_made.groups)
            process_group.log_group(
                backend or dist.get_backend(), key.index(dist.get_rank()), ring, group=_made.groups[key, purpose]
            )
    return _made.groups[key, purpose]


def _warn_in_a_loop(key: tuple[int, ...]) -> None:
    _made.requests[key] = _made.requests.get(key, 0) + 1
    if _made.requests[key] == _LOOP_AFTER:
        warnings.warn(
            f"new_group({list(key)}) was asked for {_LOOP_AFTER} times; the one group is reused. "
            "Make it once, before the loop.",
            UserWarning,
            stacklevel=3,  # the caller of new_group
        )


def name_axes(groups: Mapping[str, tuple[Group, int]]) -> None:
    """Let collectives find this rank's groups along the axes of the mesh in use by name.

    Args:
        groups: Of every axis, the group of the ranks along it and their number; a group counts for nothing along an
            axis of one rank.
    """
    _made.follow(dist.group.WORLD if dist.is_initialized() else None)
    _made.axes = dict(groups)


def along_axis(axis: str, verb: str) -> tuple[Group, int]:
    """Return the group of the ranks along an axis of the mesh in use, and their number.

    Raises:
        ConfigError: If the mesh has no such axis, or there is none yet.
    """
    _made.follow(dist.group.WORLD if dist.is_initialized() else None)
    if axis not in _made.axes:
        raise ConfigError(
            f"{verb} along axis {axis!r} needs a mesh with that axis, found {sorted(_made.axes) or 'no mesh'}."
            f"{did_you_mean(axis, _made.axes)} A mesh is there once a model is distributed; before that give group=."
        )
    return _made.axes[axis]


def size_of(group: Group) -> int:
    """Return the number of ranks in a group."""
    return dist.get_world_size(group)


def require_member(group: Group, verb: str) -> None:
    """Raise unless this rank is in the group.

    Raises:
        ConfigError: If it is not; a collective would do nothing here and leave a wrong value behind.
    """
    if group is not None and dist.get_rank(group) < 0:
        raise ConfigError(
            f"{verb} was called on rank {dist.get_rank()}, which is not in the group. "
            "Call it on the group's ranks only: `if rank in ranks:`."
        )
