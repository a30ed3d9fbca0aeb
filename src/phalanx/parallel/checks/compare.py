"""`ReplicatedTensors`: compare replicated tensors across ranks by checksum, and report where they differ.

One number for each class of tensors travels, over all ranks, so that all of them know of every difference; only where
there is one, checksums of single tensors follow, and then the tensors themselves, to measure it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.cluster.rendezvous import name_ranks
from phalanx.comm import transfers
from phalanx.comm.groups import Group, group_of
from phalanx.parallel.checks.checksum import checksums, combined

SHOWN = 8
"""Names that a message lists."""


@dataclass(frozen=True, slots=True)
class ReplicatedTensors:
    """Tensors of which each rank of a group holds a copy."""

    rank_groups: Sequence[tuple[int, ...]]
    """All ranks of the job in groups; those of one hold the same."""

    tensors: Mapping[str, Tensor]
    """This rank's, by name."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between copies; the same on all ranks of the job."""

    names: tuple[str, ...]
    holders: str
    """Which ranks hold the same, for the first of them."""

    largest: float
    """Largest difference of two copies of an element, in parts of the tensor's largest; infinite where a rank has
    another tensor, or none."""

    is_rounding: bool
    """Whether no difference is more than results of other hardware or another order of summation explain."""

    def __str__(self) -> str:
        more = f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
        return (
            f"{', '.join(self.names[:SHOWN])}{more} ({self.holders}; by up to {self.largest:.1e} of the largest value)"
        )


def may_differ(classes: Sequence[ReplicatedTensors], device: torch.device) -> bool:
    """Return whether any copies differ; the same on all ranks. Collective over all ranks of the job.

    Args:
        classes: As many, of the same groups, on every rank.
        device: Where what travels lies.
    """
    return bool(_differing_groups(classes, [combined(_sums(copies)) for copies in classes], device))


def difference(classes: Sequence[ReplicatedTensors], device: torch.device) -> Difference | None:
    """Return what differs, measured. Collective over all ranks of the job; see `may_differ`."""
    sums = [_sums(copies) for copies in classes]
    differing_groups = _differing_groups(classes, [combined(of_class) for of_class in sums], device)
    if not differing_groups:
        return None
    gathered = _gathered(json.dumps([sums[number] for number in differing_groups]), device)
    names: dict[str, str] = {}
    measured = [0.0, 0.0]
    for index, (number, rank_groups) in enumerate(differing_groups.items()):
        by_rank: list[dict[str, str]] = [of_rank[index] for of_rank in gathered]
        group = _group(classes[number].rank_groups)
        for ranks in rank_groups:
            differing = _differing([by_rank[rank] for rank in ranks])
            for name in differing:
                names.setdefault(name, _describe_holders(name, ranks, by_rank))
            if dist.get_rank() in ranks:
                for name in differing:
                    size = _measure_difference(classes[number].tensors.get(name), name, ranks, by_rank, group)
                    measured = [max(pair) for pair in zip(measured, size, strict=True)]
    largest, excess = transfers.all_reduce(torch.tensor(measured, device=device), "max", None).tolist()
    return Difference(tuple(names), next(iter(names.values())), largest, excess <= 1.0)


def broadcast_first(classes: Sequence[ReplicatedTensors]) -> None:
    """Let every copy have the values of the first rank of its group. Collective over all ranks of the job."""
    for copies in classes:
        group = _group(copies.rank_groups)
        first = next(ranks[0] for ranks in copies.rank_groups if dist.get_rank() in ranks)
        for tensor in copies.tensors.values():
            # .data leaves the version counter alone: a graph that saved the tensor can still be walked.
            tensor.data.copy_(transfers.broadcast(tensor.detach(), _place(first, group), group))


def _sums(copies: ReplicatedTensors) -> dict[str, str]:
    """Return the checksum, dtype and shape of every copy of this rank, as text by name."""
    numbers = checksums(copies.tensors)
    return {name: f"{numbers[name]} {tensor.dtype} {list(tensor.shape)}" for name, tensor in copies.tensors.items()}


def _differing_groups(
    classes: Sequence[ReplicatedTensors], mine: Sequence[int], device: torch.device
) -> dict[int, list[tuple[int, ...]]]:
    """Return, by number of the class, the groups whose ranks differ."""
    if not classes:
        return {}
    sent = torch.tensor([mine], device=device)
    rows = torch.cat(transfers.all_gather(sent, 0, [1] * dist.get_world_size(), None)).tolist()
    differing_groups: dict[int, list[tuple[int, ...]]] = {}
    for number, copies in enumerate(classes):
        for ranks in copies.rank_groups:
            if len({rows[rank][number] for rank in ranks}) > 1:
                differing_groups.setdefault(number, []).append(ranks)
    return differing_groups


def _gathered(text: str, device: torch.device) -> list[list[dict[str, str]]]:
    """Return every rank's JSON text, read."""
    sent = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    lengths = torch.cat(
        transfers.all_gather(torch.tensor([len(sent)], device=device), 0, [1] * dist.get_world_size(), None)
    )
    texts = transfers.all_gather(sent, 0, lengths.tolist(), None)
    return [json.loads(bytes(text_of_rank.cpu().tolist())) for text_of_rank in texts]


def _differing(sums: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for of_rank in sums for name in of_rank)
    return [name for name in names if len({of_rank.get(name) for of_rank in sums}) > 1]


def _describe_holders(name: str, ranks: Sequence[int], sums: Sequence[Mapping[str, str]]) -> str:
    by_checksum: dict[str | None, list[int]] = {}
    for rank in ranks:
        by_checksum.setdefault(sums[rank].get(name), []).append(rank)
    shown = [f"{name_ranks(some)}{'' if value else ' without it'}" for value, some in by_checksum.items()]
    return " against ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _measure_difference(
    tensor: Tensor | None, name: str, ranks: Sequence[int], sums: Sequence[Mapping[str, str]], group: Group
) -> tuple[float, float]:
    """Return the largest difference to the first rank's copy, and the same in units of what rounding may do."""
    kinds = {sums[rank].get(name, "").partition(" ")[2] for rank in ranks}
    if tensor is None or len(kinds) > 1:
        return float("inf"), float("inf")
    theirs = transfers.broadcast(tensor.detach(), _place(ranks[0], group), group)
    mine, theirs = _numbers(tensor.detach()), _numbers(theirs)
    gaps = torch.where((mine == theirs) | (mine.isnan() & theirs.isnan()), 0.0, (mine - theirs).abs())
    scale = max(mine.abs().nan_to_num().max().item(), theirs.abs().nan_to_num().max().item())
    size = gaps.nan_to_num(nan=float("inf")).max().item()
    relative = size / scale if size else 0.0
    return relative, relative / _rounding(tensor.dtype)


def _numbers(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64)


def _rounding(dtype: torch.dtype) -> float:
    """Return by what part of their largest element copies may differ that were computed from the same numbers."""
    if dtype.is_floating_point or dtype.is_complex:
        return min(64 * torch.finfo(dtype).eps, 1 / 32)
    return torch.finfo(torch.float64).tiny


def _group(rank_groups: Sequence[tuple[int, ...]]) -> Group:
    """Return this rank's process group; None for all ranks. Collective over all ranks of the job."""
    return None if len(rank_groups) == 1 else group_of(rank_groups)


def _place(rank: int, group: Group) -> int:
    return rank if group is None else dist.get_group_rank(group, rank)
