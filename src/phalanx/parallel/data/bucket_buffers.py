"""`Bucket`: the flat gradient buffers of data parallel, with synchronised model buffers appended."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from phalanx.errors import ConfigError
from phalanx.parallel.data.grad_reduction import GradReduction, PendingReduction
from phalanx.plan.buckets import MARK_BITS


@dataclass(slots=True)
class Gradient:
    """One parameter and its place in a bucket."""

    name: str
    param: nn.Parameter
    view: Tensor
    touched: bool = False
    """Whether this backward pass has produced a gradient for it."""


@dataclass(slots=True)
class SyncedBuffer:
    """A floating-point buffer of the model that rides in a bucket."""

    module: weakref.ref[nn.Module]
    name: str
    view: Tensor
    averaged: bool
    """Averaged by row weight (batch-norm statistics); otherwise rank 0's value."""

    def live_buffer(self) -> Tensor | None:
        """Return the buffer as it is now (modules may assign a new tensor in every forward pass).

        Raises:
            ConfigError: If its shape or dtype is not what it was.
        """
        module = self.module()
        tensor = None if module is None else getattr(module, self.name)
        buffer = None if tensor is None else stored(tensor)
        if buffer is not None and (buffer.shape != self.view.shape or buffer.dtype != self.view.dtype):
            raise ConfigError(
                f"buffer {self.name!r} of {type(module).__name__} was {_kind(self.view)} when the model was "
                f"distributed and is {_kind(buffer)} now. Register it with persistent=False, or set "
                "strategy.sync_buffers = False."
            )
        return buffer


@dataclass(slots=True)
class Bucket:
    """What travels in one all-reduce."""

    flat: Tensor
    flags: Tensor
    """One per gradient: how many ranks have one."""

    marks: Tensor
    """Two per bit of the bucket's number: how many ranks have it clear, and how many set."""

    gradients: list[Gradient]
    carried: list[SyncedBuffer]
    wire: GradReduction
    """How it is added up over the ranks."""

    own_marks: Tensor
    """This rank's marks, which the sums replace in `marks`. On the device: from the host they would wait for it."""

    pending: int = 0
    """Gradients this backward pass has not produced yet."""

    work: PendingReduction | None = None
    sharers: int = 0
    """Tensors in the memory of `flat`, as long as no script has made another."""

    def is_kept(self) -> bool:
        """Return whether a script keeps gradients of an earlier backward pass, which the next would overwrite.

        What is in `param.grad` still is meant to change: gradients add up in place.
        """
        is_shared = _sharers(self.flat) > self.sharers
        for gradient in self.gradients:
            is_referred_to = sys.getrefcount(gradient.view) > _OWN_REFERENCES
            if (is_shared or is_referred_to) and gradient.param.grad is not gradient.view:
                return True
        return False

    def renew(self) -> None:
        """Move to new memory; gradients that are still in `param.grad` move along."""
        parts = [*(g.view for g in self.gradients), self.flags, self.marks, *(c.view for c in self.carried)]
        sizes = [part.numel() for part in parts]
        self.flat = self.flat.clone()
        pieces = iter(self.flat.split(sizes))
        for gradient in self.gradients:
            is_there = gradient.param.grad is gradient.view
            gradient.view = _view_like(next(pieces), gradient.param)
            if is_there:
                gradient.param.grad = gradient.view
        self.flags, self.marks = next(pieces), next(pieces)
        for item in self.carried:
            item.view = next(pieces).view(item.view.shape)


def allocate(
    model: nn.Module,
    buckets: Sequence[tuple[Sequence[str], GradReduction]],
    readers: GradReduction,
    sync_buffers: bool,
    number: int,
) -> list[Bucket]:
    """Make the buckets of a model; its buffers ride in the last bucket of their dtype, or in one of their own.

    Args:
        model: The module, on its device.
        buckets: Parameter names of each bucket, one dtype each, and how it travels, in the order of issue.
        readers: Leads to the ranks that read rows of their own, over which buffers are combined; they ride in buckets
            that travel like this.
        sync_buffers: Whether floating-point buffers ride along.
        number: The model's.
    """
    params = dict(model.named_parameters())
    riders = list(synced_buffers(model)) if sync_buffers else []
    last_of = {params[names[0]].dtype: index for index, (names, wire) in enumerate(buckets) if wire == readers}
    result = []
    for index, (names, wire) in enumerate(buckets):
        members = [params[name] for name in names]
        dtype = members[0].dtype
        riding = [r for r in riders if _tensor(r).dtype == dtype] if last_of.get(dtype) == index else []
        result.append(_allocate_one(names, members, riding, wire, _number(number, index)))
    homeless = dict.fromkeys(_tensor(r).dtype for r in riders if _tensor(r).dtype not in last_of)
    for dtype in homeless:
        riding = [r for r in riders if _tensor(r).dtype == dtype]
        result.append(_allocate_one((), (), riding, readers, _number(number, len(result))))
    for bucket in result:
        bucket.sharers = _sharers(bucket.flat)
    return result


_OWN_REFERENCES = 2
"""References to a tensor that only a `Gradient` has: its own, and the argument of who counts."""


def _sharers(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def are_of_one_bucket(bucket: Bucket) -> bool:
    """Return whether all ranks sent the same bucket: no bit of its number that one has set is clear at another.

    Sums of nothing are exact in every dtype that travels.
    """
    return all(not clear or not count for clear, count in bucket.marks.view(-1, 2).tolist())


def stored(tensor: Tensor) -> Tensor:
    """Return a view of what an expanded tensor really holds: one of the rows that repeat."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def require_same_kind(gradient: Gradient) -> None:
    """Raise if a parameter changed dtype or device since its bucket was made."""
    param, view = gradient.param, gradient.view
    if param.dtype != view.dtype or param.device != view.device:
        raise ConfigError(
            f"parameter {gradient.name!r} was {_kind(view)} on {view.device} when the model was distributed and is "
            f"{_kind(param)} on {param.device} now. Convert or move the model before distributing it."
        )


def require_still_frozen(frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise if a parameter that was frozen when buckets were made is trained now: it travels in none."""
    thawed = [name for name, param in frozen if param.requires_grad]
    if thawed:
        others = f" (and those of {len(thawed) - 1} others)" if len(thawed) > 1 else ""
        raise ConfigError(
            f"the gradient of parameter {thawed[0]!r}{others} is not averaged over the ranks. It was frozen when the "
            "model was distributed. To train it later, distribute it with requires_grad and freeze it then."
        )


_Rider = tuple[nn.Module, str]


def _tensor(rider: _Rider) -> Tensor:
    return stored(getattr(*rider))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _allocate_one(
    names: Sequence[str], members: Sequence[nn.Parameter], riding: Sequence[_Rider], wire: GradReduction, number: int
) -> Bucket:
    like = members[0] if members else _tensor(riding[0])
    sizes = [p.numel() for p in members] + [len(members), 2 * MARK_BITS] + [_tensor(r).numel() for r in riding]
    flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
    pieces = list(flat.split(sizes))
    gradients = [
        Gradient(name, param, _view_like(piece, param))
        for name, param, piece in zip(names, members, pieces, strict=False)
    ]
    carried = [
        SyncedBuffer(
            weakref.ref(module), name, piece.view(_tensor((module, name)).shape), isinstance(module, _NormBase)
        )
        for (module, name), piece in zip(riding, pieces[len(members) + 2 :], strict=True)
    ]
    flags, marks = pieces[len(members) : len(members) + 2]
    bits = [number >> shift & 1 for shift in range(MARK_BITS)]
    own = torch.tensor([[1 - bit, bit] for bit in bits], dtype=flat.dtype, device=flat.device).view(-1)
    return Bucket(flat=flat, flags=flags, marks=marks, gradients=gradients, carried=carried, wire=wire, own_marks=own)


def _number(model: int, bucket: int) -> int:
    """Return what tells a bucket from those of other models: as many numbers as there are marks for."""
    return model % 64 << 10 | bucket % 1024


def _view_like(piece: Tensor, param: Tensor) -> Tensor:
    # A gradient keeps its parameter's memory layout (channels-last convolutions), as autograd promises.
    if param.is_contiguous() or not _fills_its_memory(param):
        return piece.view(param.shape)
    return piece.as_strided(param.shape, param.stride(), piece.storage_offset())


def _fills_its_memory(tensor: Tensor) -> bool:
    """Return whether the elements lie one after another in some order of the dims, without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def synced_buffers(model: nn.Module) -> Iterator[_Rider]:
    """Yield each floating-point buffer that `state_dict` holds, once.

    Others are caches computed from what a rank sees (rotary tables grow with its sequences), not state.
    """
    seen: set[int] = set()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            if buffer.is_floating_point() and buffer.numel() and not buffer.is_meta:
                seen.add(id(buffer))
                yield module, name
