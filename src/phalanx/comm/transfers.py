"""Collectives without autograd: check shapes, move the bytes, turn lost connections into `PeerLostError`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.groups import Group
from phalanx.comm.process_group import outsider
from phalanx.errors import ConfigError, PeerLostError

MAX_DIMS = 8
"""Dims of a tensor whose shape ranks can tell each other."""

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""Dtypes that travel in messages; both ends find one by its place here."""

_REDUCE = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|timed? ?out|timeout|connect(ion)? fail"
    r"|socket (error|closed)|remote process exited|unable to (write|read)",
    re.IGNORECASE,
)


@contextlib.contextmanager
def peers_named(verb: str, group: Group) -> Iterator[None]:
    """Turn a backend's words for a lost connection into a `PeerLostError` that says where in the job it happened.

    Raises:
        PeerLostError: Also if this worker was started again alone.
    """
    check_not_alone(verb)
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, PeerLostError) and not _LOST.search(str(error)):
            raise
        first_line = str(error).splitlines()[0].removesuffix(".")
        raise PeerLostError(
            f"{verb} on rank {dist.get_rank(group)} of {dist.get_world_size(group)} lost another rank ({first_line}). "
            "The rank that ended first says why in its log; if it was started again, no collective call works any more."
        ) from error


def check_not_alone(verb: str) -> None:
    """Check that this worker, if it has peers, is in a group with them.

    Raises:
        PeerLostError: If it was started again alone.
        ConfigError: If workers come and go.
    """
    if (role := outsider()) and role.least_workers:
        raise ConfigError(
            f"{verb} needs all workers, and in this job they come and go (--worker-num {role.least_workers}:"
            f"{role.world_size}). Leave it out, compute it from a snapshot after training, or give --worker-num one "
            "number."
        )
    if role:
        raise PeerLostError(
            f"{verb} needs all {role.world_size} workers, and worker {role.rank} was started again alone: it trains "
            "through the servers, and the others' group continues without it. Leave barriers and metrics out where "
            "workers may be started again, or compute them from a snapshot after training."
        )


def all_reduce(x: Tensor, op: str, group: Group) -> Tensor:
    """Return the reduction of `x` over the group."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    with peers_named("all_reduce", group):
        dist.all_reduce(total, op=_REDUCE[op], group=group)
    return total.div_(dist.get_world_size(group)) if op == "mean" else total


def broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    """Return the group's rank `src`'s `x`."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    with peers_named("broadcast", group):
        dist.broadcast(out, group=group, group_src=src)
    return out


def all_gather(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Return all ranks' parts; parts shorter than the longest travel padded."""
    longest = max(sizes)
    padded = _padded(x.detach(), dim, longest).contiguous()
    parts = [torch.empty_like(padded) for _ in sizes]
    with peers_named("all_gather", group):
        dist.all_gather(parts, padded, group=group)
    return [part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)]


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    if x.shape[dim] == length:
        return x
    shape = list(x.shape)
    shape[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)


def reduce_scatter(x: Tensor, dim: int, sizes: Sequence[int], op: str, group: Group) -> Tensor:
    """Return this rank's slice of the reduction.

    Slices travel to their owner, which adds them in rank order: no rank sends more than it must, uneven slices cost no
    padding, and the sum does not depend on how fast ranks are.
    """
    mine = sizes[dist.get_rank(group)]
    shape = list(x.shape)
    shape[dim] = mine
    arrived = _swap([s.contiguous() for s in torch.split(x.detach(), list(sizes), dim)], [shape] * len(sizes), group)
    total = arrived[0].clone()
    for part in arrived[1:]:
        total += part
    return total / len(sizes) if op == "mean" else total


@dataclass(frozen=True, slots=True)
class Exchange:
    """Who sends what to whom in one all_to_all, as this rank sees it."""

    split_dim: int
    concat_dim: int
    sent: tuple[tuple[int, ...], ...]
    """Shape of the slice for each rank."""

    received: tuple[tuple[int, ...], ...]
    """Shape of the slice from each rank."""

    def reversed(self) -> Exchange:
        """The exchange that undoes this one."""
        return Exchange(self.concat_dim, self.split_dim, self.received, self.sent)


def plan_exchange(x: Tensor, split_dim: int, concat_dim: int, slices: Sequence[int], group: Group) -> Exchange:
    """Return the exchange in which every rank cuts its tensor by its own `slices`; ranks tell each other theirs."""
    size, rank = len(slices), dist.get_rank(group)
    metadata = _exchange_metadata(list(_shape_vector(x, "all_to_all")) + list(slices), x.device, group)
    shapes = [tuple(t[1 : 1 + t[0]]) for t in metadata]
    cuts = [t[1 + MAX_DIMS :] for t in metadata]

    def shape_sent(origin: int, target: int) -> tuple[int, ...]:
        return _with(shapes[origin], split_dim, cuts[origin][target])

    if len({len(s) for s in shapes}) > 1:
        raise _misfit("all_to_all", shapes, concat_dim)
    for target in range(size):
        arriving = [shape_sent(origin, target) for origin in range(size)]
        if len({_without(s, concat_dim) for s in arriving}) > 1:
            raise _misfit(f"all_to_all to rank {target}", arriving, concat_dim)
    return Exchange(
        split_dim,
        concat_dim,
        tuple(shape_sent(rank, r) for r in range(size)),
        tuple(shape_sent(r, rank) for r in range(size)),
    )


def known_exchange(
    x: Tensor, split_dim: int, concat_dim: int, slices: Sequence[int], arriving: Sequence[int], group: Group
) -> Exchange:
    """Return the exchange of slices whose sizes every rank knows: `slices` go out, `arriving` along `concat_dim` come.

    Raises:
        ConfigError: If there is not one size for each rank, or this rank's own slice does not have its size.
    """
    rank = dist.get_rank(group)
    sent = [_with(x.shape, split_dim, size) for size in slices]
    received = [_with(sent[rank], concat_dim, size) for size in arriving]
    if len(received) != len(sent) or received[rank] != sent[rank]:
        raise ConfigError(
            f"all_to_all on rank {rank} of {len(sent)} keeps a slice of shape {sent[rank]}, found "
            f"arriving={list(arriving)} along dim {concat_dim}. Give one size per rank, this rank's own among them."
        )
    return Exchange(split_dim, concat_dim, tuple(sent), tuple(received))


def all_to_all(x: Tensor, plan: Exchange, group: Group) -> Tensor:
    """Carry out an exchange."""
    if plan.split_dim == plan.concat_dim == 0:
        return _swap_rows(x.detach().contiguous(), plan, group)
    cuts = [shape[plan.split_dim] for shape in plan.sent]
    slices = [s.contiguous() for s in torch.split(x.detach(), cuts, plan.split_dim)]
    return torch.cat(_swap(slices, plan.received, group), plan.concat_dim)


def _swap_rows(x: Tensor, plan: Exchange, group: Group) -> Tensor:
    """Exchange runs of rows, which lie one after the other as they are to be sent, and as they arrive."""
    sent, received = [shape[0] for shape in plan.sent], [shape[0] for shape in plan.received]
    out = x.new_empty((sum(received), *x.shape[1:]))
    with peers_named("all_to_all", group):
        dist.all_to_all_single(out, x, received, sent, group=group)
    return out


def _swap(slices: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group) -> list[Tensor]:
    """Send one contiguous slice to each rank and return what arrived, in the given shapes."""
    flat = torch.cat([s.reshape(-1) for s in slices])
    counts = [torch.Size(shape).numel() for shape in shapes]
    out = flat.new_empty(sum(counts))
    with peers_named("all_to_all", group):
        dist.all_to_all_single(out, flat, counts, [s.numel() for s in slices], group=group)
    return [part.view(tuple(shape)) for part, shape in zip(torch.split(out, counts), shapes, strict=True)]


def send(x: Tensor, dst: int, requires_grad: bool, group: Group) -> None:
    """Send a tensor to the group's rank `dst`, its looks first.

    Raises:
        ConfigError: If it has too many dims, or a dtype that does not travel.
    """
    if x.dtype not in _DTYPES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ConfigError(f"send carries {dtypes}, found {x.dtype}. Convert the tensor, or view it as one of them.")
    looks = [*_shape_vector(x, "send"), _DTYPES.index(x.dtype), int(requires_grad)]
    send_values(torch.tensor(looks, dtype=torch.int64, device=x.device), dst, group)
    send_values(x, dst, group)


def send_values(x: Tensor, dst: int, group: Group) -> None:
    """Send a tensor whose looks the group's rank `dst` knows."""
    with peers_named("send", group):
        dist.send(x.detach().contiguous(), group=group, group_dst=dst)


def recv(src: int, device: torch.device, group: Group) -> tuple[Tensor, bool]:
    """Return what the group's rank `src` sent, and whether it requires a gradient."""
    count, *shape, dtype, requires_grad = recv_like(
        torch.empty(MAX_DIMS + 3, dtype=torch.int64, device=device), src, group
    ).tolist()
    like = torch.empty(shape[:count], dtype=_DTYPES[dtype], device=device)
    return recv_like(like, src, group), bool(requires_grad)


def recv_like(like: Tensor, src: int, group: Group) -> Tensor:
    """Return what the group's rank `src` sent, which has shape, dtype and device of `like`."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    with peers_named("recv", group):
        dist.recv(out, group=group, group_src=src)
    return out


def part_sizes(x: Tensor, dim: int, sizes: Sequence[int] | None, same_shapes: bool, group: Group) -> list[int]:
    """Return every rank's size along `dim`: as given, as promised, or as the ranks tell each other.

    Raises:
        ConfigError: If `sizes` contradict `x`, or shapes differ elsewhere.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if same_shapes:
        return [x.shape[dim]] * size
    if sizes is not None:
        if len(sizes) != size or sizes[rank] != x.shape[dim]:
            raise ConfigError(
                f"all_gather on rank {rank} of {size} holds {x.shape[dim]} along dim {dim}, found sizes={list(sizes)}. "
                "Give one size per rank, this rank's own among them."
            )
        return list(sizes)
    shapes = [tuple(t[1 : 1 + t[0]]) for t in _exchange_metadata(list(_shape_vector(x, "all_gather")), x.device, group)]
    if len({_without(s, dim) for s in shapes}) > 1:
        raise _misfit("all_gather", shapes, dim)
    return [shape[dim] for shape in shapes]


def _shape_vector(x: Tensor, verb: str) -> tuple[int, ...]:
    if x.dim() > MAX_DIMS:
        raise ConfigError(f"{verb} takes tensors of up to {MAX_DIMS} dims, found shape {tuple(x.shape)}. Flatten some.")
    return (x.dim(), *x.shape, *[0] * (MAX_DIMS - x.dim()))


def _exchange_metadata(numbers: list[int], device: torch.device, group: Group) -> list[list[int]]:
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with peers_named("all_gather of shapes", group):
        dist.all_gather(everyone, mine, group=group)
    return [[int(n) for n in t.tolist()] for t in everyone]


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (len(shape), *shape[:dim], *shape[dim + 1 :])


def _misfit(verb: str, shapes: Sequence[Sequence[int]], dim: int) -> ConfigError:
    listed = ", ".join(f"rank {r} {tuple(s)}" for r, s in enumerate(shapes))
    return ConfigError(
        f"{verb} joins tensors that may differ along dim {dim} only, found {listed}. Make the rest equal."
    )
