"""`PartialSums`: deterministic tree reduction of the gradients of logical replicas, whichever ranks computed them.

The tree over replicas [0, V) has the longest power of two below V on its left and the rest on its right, and so on down
to single replicas. A rank adds up what lies inside its own run of replicas and sends at most 2 log2(V) partial sums;
every number of the result is the same expression on any number of ranks. The shared-memory all-reduce adds up ranks in
the same tree (`csrc/shm_reduce.cc`), so it serves where every rank holds one complete branch.

Sums of 16-bit numbers are kept in float32 and rounded once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm.elastic.membership import wait_for
from phalanx.comm.groups import Group

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch 2.13 renames it, and warns at the old name."""


def split_of(run: range) -> int:
    """Return where the right half of a branch of two replicas or more begins."""
    return run.start + (1 << (len(run) - 1).bit_length() - 1)


def branches(replicas: Sequence[int], count: int) -> list[range]:
    """Return the largest complete branches of the tree over `count` replicas that some of them fill, in order."""
    members = frozenset(replicas)

    def within(branch: range) -> list[range]:
        inside = members.intersection(branch)
        if len(inside) in (0, len(branch)):
            return [branch] if inside else []
        middle = split_of(branch)
        return within(range(branch.start, middle)) + within(range(middle, branch.stop))

    return within(range(count))


@cache
def _are_halves(left: range, right: range, count: int) -> bool:
    """Return whether two adjacent branches of the tree over `count` replicas are the halves of one."""
    both = range(left.start, right.stop)
    return branches(both, count) == [both] and split_of(both) == right.start


@dataclass(slots=True)
class PartialSums:
    """Sums over the largest branches of the tree that some replicas fill so far, in the order of the replicas."""

    count: int
    """Replicas of the tree."""

    sums: list[tuple[range, Tensor]] = field(default_factory=list)

    def add(self, run: range, value: Tensor) -> None:
        """Add the sum over a further branch; its memory is used from now on.

        Args:
            run: The branch; a single replica, or several.
            value: Its sum, in float32 or float64.
        """
        at = bisect_left(self.sums, run.start, key=lambda entry: entry[0].start)
        self.sums.insert(at, (run, value))
        while (left := self._pair_at(at)) is not None:
            (first_run, first), (second_run, second) = self.sums[left : left + 2]
            self.sums[left : left + 2] = [(range(first_run.start, second_run.stop), first.add_(second))]
            at = left

    def has(self, replica: int) -> bool:
        """Return whether a replica is in one of the sums."""
        return any(replica in run for run, _ in self.sums)

    def _pair_at(self, at: int) -> int | None:
        """Return where two sums lie that are the halves of one branch, one of them at this place; None if neither."""
        for left in (at - 1, at):
            if left < 0 or left + 2 > len(self.sums):
                continue
            (first, _), (second, _) = self.sums[left : left + 2]
            if first.stop == second.start and _are_halves(first, second, self.count):
                return left
        return None

    def clear(self) -> None:
        """Forget all."""
        self.sums.clear()


def wide(value: Tensor) -> Tensor:
    """Return a copy of numbers in the dtype in which they are added up."""
    dtype = torch.float32 if value.dtype in (torch.bfloat16, torch.float16) else value.dtype
    return value.to(dtype, copy=True)


def is_one_branch_each(assignment: tuple[Sequence[int], ...]) -> bool:
    """Return whether the tree over ranks, each with its branch, is the tree over replicas."""
    if not all(isinstance(local, range) for local in assignment):
        return False
    return _is_one_branch_each(tuple(range(local[0], local[-1] + 1) for local in assignment))


@cache
def _is_one_branch_each(assignment: tuple[range, ...]) -> bool:
    count = assignment[-1].stop

    def fits(ranks: range) -> bool:
        run = range(assignment[ranks.start].start, assignment[ranks.stop - 1].stop)
        if branches(run, count) != [run]:
            return False
        if len(ranks) == 1:
            return True
        middle = split_of(ranks)
        is_cut_alike = split_of(run) == assignment[middle].start
        return is_cut_alike and fits(range(ranks.start, middle)) and fits(range(middle, ranks.stop))

    return fits(range(len(assignment)))


def adds_up_in_tree(group: Group, tensor: Tensor) -> bool:
    """Return whether the all-reduce of a group adds up its ranks in the fixed tree."""
    if dist.get_world_size(group) <= 2:
        return True
    process_group = dist.group.WORLD if group is None else group
    backend = process_group._get_backend(tensor.device) if process_group is not None else None
    return getattr(backend, "carrier", "") == "shm"


def scatter_sums(own: PartialSums, assignment: Sequence[Sequence[int]], group: Group) -> Tensor:
    """Return this rank's slice of the sum over all replicas. Collective.

    Args:
        own: This rank's partial sums, over all replicas that it holds, of one-dimensional tensors whose length the
            number of ranks divides. They are used up.
        assignment: The replicas of each rank of the group.
        group: The ranks.
    """
    ranks, values = len(assignment), [value for _, value in own.sums]
    share = values[0].numel() // ranks
    sent = values[0] if len(values) == 1 else torch.stack([value.view(ranks, share) for value in values], 1).flatten()
    runs = [branches(local, own.count) for local in assignment]
    received = sent.new_empty(share * sum(map(len, runs)))
    arriving, leaving = [share * len(run) for run in runs], [share * len(values)] * ranks
    wait_for(dist.all_to_all_single(received, sent, arriving, leaving, group=group, async_op=True))
    total = PartialSums(own.count)
    for run, part in zip(chain.from_iterable(runs), received.split(share), strict=True):
        total.add(run, part)
    return total.sums[0][1]


def exchange_sums(own: PartialSums, assignment: Sequence[Sequence[int]], group: Group) -> Tensor:
    """Return the sum over all replicas, the same bits on every rank. Collective over several ranks.

    Each rank adds up one slice of the numbers and hands out the result.

    Args:
        own: This rank's partial sums, over all replicas that it holds, of one-dimensional tensors. They are used up.
        assignment: The replicas of each rank of the group.
        group: The ranks.
    """
    ranks = len(assignment)
    if ranks == 1:
        return own.sums[0][1]
    size = own.sums[0][1].numel()
    padding = -size % ranks
    if padding:
        own = PartialSums(own.count, [(run, nn.functional.pad(value, (0, padding))) for run, value in own.sums])
    mine = scatter_sums(own, assignment, group)
    result = mine.new_empty(size + padding)
    wait_for(_gather(result, mine, group=group, async_op=True))
    return result[:size]
