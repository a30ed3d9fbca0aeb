"""`AuditedCall`: a forward pass that another rank computes again, as bytes and back.

A JSON header and the memory of the tensors: nothing that a rank receives is run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.local.random_state import RandomState
from phalanx.errors import ConfigError


@dataclass(slots=True)
class AuditedCall:
    """A forward pass, as it has to be computed again."""

    leaves: list[Any]
    spec: Any
    buffers: dict[str, Tensor]
    states: RandomState
    output_grads: dict[int, Tensor] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)
    """Of the parameters' gradients as the backward pass computed them."""


def pack_call(call: AuditedCall | None) -> bytes:
    """Return a call as bytes: a JSON header, then the memory of its tensors.

    Raises:
        ConfigError: If the model was called with what has no bytes.
    """
    if call is None or not call.output_grads:
        raise ConfigError(
            "strategy.audit found no forward and backward pass of the chosen replica. Call the distributed model "
            "itself in each step, or set audit = 0."
        )
    tensors: list[Tensor] = []

    def describe(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.contiguous().cpu())
            return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if value is None or isinstance(value, bool | int | float | str):
            return [value]
        raise ConfigError(
            f"strategy.audit cannot send a {type(value).__name__} that the model is called with. Call it with tensors "
            "and numbers, or set audit = 0."
        )

    header = {
        "leaves": [describe(leaf) for leaf in call.leaves],
        "buffers": {name: describe(buffer) for name, buffer in call.buffers.items()},
        "states": {
            name: [describe(part) for part in (state if isinstance(state, tuple) else (state,))]
            for name, state in call.states.to_dict().items()
        },
        "output_grads": {str(index): describe(grad) for index, grad in call.output_grads.items()},
        "digests": call.digests,
    }
    text = json.dumps(header).encode()
    body = b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return len(text).to_bytes(8, "little") + text + body


def read_header(payload: bytes) -> dict[str, Any]:
    """Return what a call's bytes say of it before its tensors."""
    header: dict[str, Any] = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    return header


def unpack_call(payload: bytes, spec: Any, device: torch.device) -> AuditedCall:
    """Return the call that a rank sent; the structure of its inputs is that of a call of this rank."""
    header = read_header(payload)
    position = 8 + int.from_bytes(payload[:8], "little")

    def read(entry: Any, *, to: torch.device = device) -> Any:
        nonlocal position
        if isinstance(entry, list):
            return entry[0]
        empty = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        data = bytearray(payload[position : position + empty.nbytes])
        position += empty.nbytes
        if not data:
            return empty.to(to)
        return torch.frombuffer(data, dtype=empty.dtype).reshape(entry["shape"]).to(to)

    leaves = [read(entry) for entry in header["leaves"]]
    buffers = {name: read(entry) for name, entry in header["buffers"].items()}
    cpu = torch.device("cpu")
    parts = {name: tuple(read(entry, to=cpu) for entry in entries) for name, entries in header["states"].items()}
    states = RandomState.from_dict({name: some if len(some) > 1 else some[0] for name, some in parts.items()})
    grads = {int(index): read(entry) for index, entry in header["output_grads"].items()}
    return AuditedCall(leaves, spec, buffers, states, grads)


def broadcast_bytes(data: bytes, source: int, device: torch.device) -> bytes:
    """Return one rank's bytes on all ranks. Collective."""
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, source)
    buffer = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, source)
    return buffer.cpu().numpy().tobytes()
