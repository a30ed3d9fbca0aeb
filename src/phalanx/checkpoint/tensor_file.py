"""Files of tensors in the safetensors format: written in one pass with their digest, read a part at a time.

The format is 8 bytes with the length of a JSON header, the header, and the tensors' bytes without gaps
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import ConfigError, DataError

BLOCK_BYTES = 8 << 20
"""How much is read at once for a digest; the pages stay in the processor's cache in between."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class Written:
    """A file as it was written."""

    name: str
    bytes: int
    sha256: str
    begins: tuple[int, ...]
    """Offset of every tensor in the file, in the order in which they were given."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset in the file."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in the format.

    Raises:
        ConfigError: If the format has no such dtype.
    """
    if dtype not in _NAMES:
        raise ConfigError(f"a tensor of {dtype} cannot be saved. Convert it to one of {', '.join(map(str, _NAMES))}.")
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name in the format.

    Raises:
        DataError: If it is none.
    """
    if name not in _DTYPES:
        raise DataError(f"dtype {name!r} is not known to this version. Read the file with the version that wrote it.")
    return _DTYPES[name]


def lay_out(shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a file of these tensors, and the offset of each tensor in it.

    Args:
        shapes: dtype and shape by name.
    """
    # Larger items first, so that every tensor begins at a multiple of its item size.
    order = sorted(shapes, key=lambda name: -shapes[name][0].itemsize)
    header, ends, at = {}, {}, 0
    for name in order:
        dtype, shape = shapes[name]
        ends[name] = at
        count = 1
        for extent in shape:
            count *= extent
        at += count * dtype.itemsize
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [ends[name], at]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + ends[name] for name in shapes}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write a file of tensors and make it durable.

    Args:
        path: The file; it must not be there yet.
        tensors: Contiguous tensors on the CPU, by name.

    Raises:
        OSError: If the file system does not take it.
    """
    head, begins = lay_out({name: (t.dtype, t.shape) for name, t in tensors.items()})
    digest, total = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        contents = (bytes_of(tensors[name]) for name in sorted(begins, key=begins.__getitem__))
        for view in (memoryview(head), *contents):
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                digest.update(block)
                while block:
                    block = block[file.write(block) :]
            total += len(view)
        os.fsync(file.fileno())
    return Written(path.name, total, digest.hexdigest(), tuple(begins[name] for name in tensors))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        block = memoryview(bytearray(BLOCK_BYTES))
        while n := file.readinto(block):
            digest.update(block[:n])
    return digest.hexdigest()


class TensorFile:
    """A file of tensors, mapped: only what is used of it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            # Copy on access only keeps torch from complaining about memory it may not write; nothing is written.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, slot: Slot) -> Tensor:
        """Return one tensor, a view into the file.

        Raises:
            DataError: If the file ends before it.
        """
        count = 1
        for extent in slot.shape:
            count *= extent
        if not count:
            return torch.empty(slot.shape, dtype=slot.dtype)
        if slot.begin + count * slot.dtype.itemsize > len(self._map):
            raise DataError(f"{self.path} ends at byte {len(self._map)}, inside a tensor. Take another copy.")
        return torch.frombuffer(self._map, dtype=slot.dtype, count=count, offset=slot.begin).view(slot.shape)

    def slots(self) -> dict[str, Slot]:
        """Return what the file's own header says it holds.

        Raises:
            DataError: If it is no safetensors file.
        """
        length = int.from_bytes(self._map[:8], "little")
        try:
            if length > len(self._map) - 8:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(self._map[8 : 8 + length])
            header.pop("__metadata__", None)
            return {
                name: Slot(dtype_of(said["dtype"]), tuple(said["shape"]), 8 + length + said["data_offsets"][0])
                for name, said in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{self.path} is no safetensors file: {error}.") from None
