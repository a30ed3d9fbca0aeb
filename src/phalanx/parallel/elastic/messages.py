"""`exchange_trees`: every rank sends every other a tree of values and tensors, and is told when a member is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.elastic.membership import wait_for
from phalanx.state_tree import pack_tree, unpack_tree

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name, `torch.float32`."""
    return _DTYPES[name]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def exchange_trees(trees: Sequence[Any]) -> list[Any]:
    """Send a tree to each rank, and return those of all ranks. Collective; None travels as nothing.

    Args:
        trees: Dicts, lists and tuples of numbers, text and tensors, by rank.

    Raises:
        PeerLostError: If a member of this elastic job is lost meanwhile.
    """
    sent = [_encode(tree) for tree in trees]
    leaving = torch.tensor([message.numel() for message in sent])
    arriving = torch.empty_like(leaving)
    wait_for(dist.all_to_all_single(arriving, leaving, async_op=True))
    sizes = arriving.tolist()
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    wait_for(dist.all_to_all_single(received, torch.cat(sent), sizes, leaving.tolist(), async_op=True))
    return [_decode(message) for message in received.split(sizes)]


def _encode(tree: Any) -> Tensor:
    """Return a tree as bytes: the length of its text, the text, and its tensors one after another."""
    if tree is None:
        return torch.empty(0, dtype=torch.uint8)
    tensors: dict[str, Tensor] = {}
    packed = pack_tree(tree, "tree", tensors, verb="send")
    shapes = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    text = json.dumps([packed, shapes]).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *(bytes_of(tensor.detach().cpu().contiguous()) for tensor in tensors.values())])


def _decode(message: Tensor) -> Any:
    if not message.numel():
        return None
    length = int.from_bytes(message[:8].numpy().tobytes(), "little")
    packed, shapes = json.loads(message[8 : 8 + length].numpy().tobytes())
    offset, tensors = 8 + length, {}
    for name, dtype, shape in shapes:
        tensors[name] = tensor = torch.empty(shape, dtype=dtype_of(dtype))
        bytes_of(tensor).copy_(message[offset : offset + tensor.nbytes])
        offset += tensor.nbytes
    return unpack_tree(packed, tensors)
