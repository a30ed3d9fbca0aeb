"""`send_state`, `receive_state`: give a rank that joins the state of the training, from the memory of a peer."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.comm.elastic.shared_state import collect_state, load_state, share_with_joiners
from phalanx.errors import ConfigError
from phalanx.parallel.elastic.messages import bytes_of, dtype_of
from phalanx.parallel.session import optimizer_record
from phalanx.parallel.stateful import saved_state_of
from phalanx.state_tree import pack_tree, unpack_tree


def send_state(rank: int) -> None:
    """Send the state of this rank to a rank that receives it."""
    tensors: dict[str, Tensor] = {}
    tree = pack_tree(collect_state(), "state", tensors, verb="send")
    shapes = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    text = torch.frombuffer(bytearray(json.dumps([tree, shapes]).encode()), dtype=torch.uint8)
    dist.send(torch.tensor([len(text)]), rank)
    dist.send(text, rank)
    for tensor in tensors.values():
        if tensor.numel():
            dist.send(bytes_of(tensor.detach().cpu().contiguous()), rank)


def receive_state(rank: int) -> None:
    """Take over the state that a rank sends."""
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, rank)
    text = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(text, rank)
    tree, shapes = json.loads(text.numpy().tobytes())
    tensors = {name: torch.empty(shape, dtype=dtype_of(dtype)) for name, dtype, shape in shapes}
    for tensor in tensors.values():
        if tensor.numel():
            dist.recv(bytes_of(tensor), rank)
    load_state(unpack_tree(tree, tensors))


class ModelState:
    """Parameters and buffers of a model, of which every rank has all, and what checkpoints keep beside them.

    Lives as long as the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        model._peer_state = self  # type: ignore[assignment]
        share_with_joiners("model", self)

    def state_dict(self) -> Mapping[str, Any]:
        """See `PeerState`."""
        model = self._model()
        assert model is not None
        return {"tensors": _tensors_of(model), "extra": _extra_state(model)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PeerState`."""
        model = self._model()
        assert model is not None
        tensors = _tensors_of(model)
        for name, value in state["tensors"].items():
            tensors[name].copy_(value)
        _load_extra_state(model, state["extra"])


class OptimizerState:
    """Groups and state of an optimizer, bit for bit, its schedulers, and what checkpoints keep beside them.

    Lives as long as the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        optimizer._peer_state = self  # type: ignore[attr-defined]
        share_with_joiners("optimizer", self)

    def state_dict(self) -> Mapping[str, Any]:
        """See `PeerState`."""
        optimizer = self._optimizer()
        assert optimizer is not None
        schedulers = [[type(each).__name__, each.state_dict()] for each in schedulers_of(optimizer)]
        record = optimizer_record(optimizer)
        with nullcontext() if record.shards is None else record.shards.left_out():  # shards come by themselves
            state = optimizer.state_dict()
        return {**state, "extra": _extra_state(optimizer), "schedulers": schedulers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PeerState`."""
        optimizer = self._optimizer()
        assert optimizer is not None
        extra, schedulers = state.pop("extra"), state.pop("schedulers")
        optimizer.load_state_dict(state)
        _load_schedulers(optimizer, schedulers)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, entries in state["state"].items():  # torch casts floating-point state to its parameter's dtype
            optimizer.state[params[index]] = {
                key: value.to(params[index].device) if isinstance(value, Tensor) and value.dim() else value
                for key, value in entries.items()
            }
        _load_extra_state(optimizer, extra)


def schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the learning-rate schedulers of an optimizer, sorted by class. Torch lists them nowhere."""
    return sorted(
        (
            each
            for each in gc.get_objects()
            if issubclass(type(each), LRScheduler) and getattr(each, "optimizer", None) is optimizer
        ),
        key=lambda each: type(each).__name__,
    )


def _load_schedulers(optimizer: Optimizer, states: list[tuple[str, dict[str, Any]]]) -> None:
    live = schedulers_of(optimizer)
    if [type(each).__name__ for each in live] != [name for name, _ in states]:
        raise ConfigError(
            f"a peer has schedulers {[name for name, _ in states]} of an optimizer, and this rank, which joins, has "
            f"{[type(each).__name__ for each in live]}. Make schedulers before px.load, Checkpointer.resume() and the "
            "first batch, so that they can take over the peer's state."
        )
    for each, (_, state) in zip(live, states, strict=True):
        each.load_state_dict(state)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _extra_state(owner: nn.Module | Optimizer) -> dict[str, Any]:
    return {name: dict(entry.source.state_dict()) for name, entry in saved_state_of(owner).items()}


def _load_extra_state(owner: nn.Module | Optimizer, states: dict[str, Any]) -> None:
    entries = saved_state_of(owner)
    for name, state in states.items():
        if name in entries:
            entries[name].source.load_state_dict(state)
