"""`send`, `recv`: send and receive activations between pipeline stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import transfers
from phalanx.comm.groups import Group
from phalanx.errors import PlanError

Form = Any
"""Values with numbers in the places of tensors, ready for JSON."""


def pack(value: Any, tensors: list[Tensor]) -> Form:
    """Return the form of a value, and append its tensors.

    Raises:
        PlanError: If it holds something that cannot travel.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value) in (tuple, torch.Size):
        return {"tuple": [pack(part, tensors) for part in value]}
    if type(value) is list:
        return {"list": [pack(part, tensors) for part in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: pack(part, tensors) for key, part in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise PlanError(
        f"stages hand on tensors, numbers, and tuples, lists and dicts of them, found {type(value).__name__}. Return "
        "one of these, or keep what makes it and what uses it in one stage by pipeline_configs cuts."
    )


def unpack(form: Form, tensors: Sequence[Tensor]) -> Any:
    """Return the value of this form with these tensors."""
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(unpack(part, tensors) for part in content)
    if kind == "list":
        return [unpack(part, tensors) for part in content]
    if kind == "dict":
        return {key: unpack(part, tensors) for key, part in content.items()}
    return content


def send(form: Form, tensors: Sequence[Tensor], dst: int, device: torch.device, group: Group) -> None:
    """Send packed values to the group's rank `dst`, which calls `recv`. Blocks until they are on their way."""
    header = torch.frombuffer(bytearray(json.dumps([form, len(tensors)]).encode()), dtype=torch.uint8)
    transfers.send(header.to(device), dst, False, group)
    for tensor in tensors:
        transfers.send(tensor, dst, tensor.requires_grad, group)


def recv(src: int, device: torch.device, group: Group) -> tuple[Form, list[Tensor]]:
    """Receive packed values; tensors require a gradient where they did."""
    header, _ = transfers.recv(src, device, group)
    form, count = json.loads(bytes(header.cpu().tolist()))
    arrived = (transfers.recv(src, device, group) for _ in range(count))
    return form, [tensor.requires_grad_(requires_grad) for tensor, requires_grad in arrived]


class StageBoundary(torch.autograd.Function):
    """Makes a value fit to cross between stages, without a copy where it is already.

    Torch's stages send what is contiguous, gradients too, and take the graph off what they sent, which views refuse.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the same numbers, contiguous and no view."""
        return x.contiguous().data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient, contiguous."""
        return grads[0].contiguous()
