"""`ShardedState`: an optimizer whose state ranks that may leave and join keep in shards, each its own (ZeRO 1).

Ranks have all parameters and, after the reduction, all gradients. At an update the optimizer gets this rank's shards of
both in the place of whole ones, and so makes state for these alone; then ranks gather the parameters. A mirrored shard
is updated twice, by two ranks, with the same bits: that sends nothing, where a copy of the state would be sent.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.comm.elastic.membership import wait_for
from phalanx.errors import ConfigError, InternalError
from phalanx.parallel.elastic.state_shards import BlockTable, StateShard, runs_of, shards_of

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch 2.13 renames it, and warns at the old name."""


@dataclass(frozen=True, slots=True)
class StateSlice:
    """Optimizer state of a run of elements of one parameter."""

    index: int
    """Which parameter."""

    start: int
    stop: int
    state: Mapping[str, Any]

    def part(self, start: int, stop: int) -> StateSlice:
        """Return the part of it in a run of elements, sharing its memory."""
        start, stop = max(start, self.start), min(stop, self.stop)
        parts = {}
        for key, value in self.state.items():
            if _is_by_element(value):
                _check_size(value, (self.stop - self.start,))
                value = value[start - self.start : stop - self.start]
            parts[key] = value
        return StateSlice(self.index, start, stop, parts)


class ShardedState:
    """The shards of one optimizer's state that this rank keeps.

    Args:
        optimizer: Updates every element by itself. It lives longer than this.
        rank: This rank.
        ranks: How many there are.
        mirror: Whose shards a rank keeps beside its own: those of so many ranks after it.

    Raises:
        ConfigError: If the memory of a parameter has gaps.
    """

    def __init__(self, optimizer: Optimizer, rank: int, ranks: int, mirror: int) -> None:
        self.mirror = mirror
        self._optimizer = weakref.ref(optimizer)
        self._params: list[Tensor] = _params_of(optimizer)
        gap = next((param for param in self._params if not param.is_contiguous()), None)
        if gap is not None:
            raise ConfigError(
                f"sharding where ranks may leave and join (-n a:b) cuts parameters in the order of their memory, and "
                f"one of shape {tuple(gap.shape)} is not contiguous. Make it so before: param.data = "
                "param.data.contiguous()."
            )
        self.table = BlockTable([param.numel() for param in self._params])
        self.shards: tuple[StateShard, ...] = ()
        """Those that this rank keeps, its own first."""

        self._slices: list[tuple[int, int, int, nn.Parameter]] = []
        """Index, start and stop of what the optimizer updates here, and the parameter that stands for it."""

        self._state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._away: tuple[list[list[Tensor]], defaultdict[Tensor, Any]] | None = None
        """The whole parameters of each group and the optimizer's own state, while slices are in their place."""

        self._is_whole = False
        self.install(shards_of(rank, ranks, mirror), ())
        optimizer.register_state_dict_pre_hook(self._refuse_part)

    @property
    def is_in_use(self) -> bool:
        """Whether the optimizer lives."""
        return self._optimizer() is not None

    @property
    def share(self) -> float:
        """How much of the parameters' elements this rank has state of, from 0 to 1."""
        total = sum(param.numel() for param in self._params)
        return sum(stop - start for _, start, stop, _ in self._slices) / max(total, 1)

    # -- an update -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def put_slices(self, optimizer: Optimizer) -> None:
        """Let the optimizer update this rank's shards only.

        Raises:
            ConfigError: If it trains other parameters than when it was distributed.
        """
        self.put_back(optimizer)  # a step that raised left them
        self._take_loaded()
        if list(map(id, _params_of(optimizer))) != list(map(id, self._params)):
            raise ConfigError(
                "parameters were added to an optimizer whose state is sharded where ranks may leave and join (-n a:b). "
                "Add them before px.distribute."
            )
        slices: dict[int, list[Tensor]] = {}
        for index, start, stop, piece in self._slices:
            whole = self._params[index]
            piece.data = whole.data.view(-1)[start:stop]
            piece.grad = None if whole.grad is None else whole.grad.view(-1)[start:stop]
            slices.setdefault(id(whole), []).append(piece)
        self._away = [group["params"] for group in optimizer.param_groups], optimizer.state
        for group in optimizer.param_groups:
            group["params"] = [piece for whole in group["params"] for piece in slices.get(id(whole), ())]
        optimizer.state = self._state

    def put_back(self, optimizer: Optimizer) -> None:
        """Let the optimizer have whole parameters again, and no state."""
        if self._away is None:
            return
        (groups, optimizer.state), self._away = self._away, None
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        for *_, piece in self._slices:
            piece.grad = None

    @torch.no_grad()
    def gather(self, rank: int, ranks: int) -> None:
        """Take over the parameters that the other ranks have updated, each its own shard. Collective.

        Raises:
            PeerLostError: If a member of this elastic job is lost meanwhile.
        """
        if ranks == 1:
            return
        runs = [StateShard(index, ranks).blocks(self.table.total) for index in range(ranks)]
        sizes = [sum(part.nbytes for part in self._values(run)) for run in runs]
        longest = max(sizes)
        own = [part.view(torch.uint8) for part in self._values(runs[rank])]
        sent = torch.cat([*own, torch.empty(longest - sizes[rank], dtype=torch.uint8, device=self._device)])
        received = sent.new_empty(longest * ranks)
        wait_for(_gather(received, sent, async_op=True))
        for index, part in enumerate(received.split(longest)):
            if StateShard(index, ranks) not in self.shards:
                self._write(runs[index], part)

    @property
    def _device(self) -> torch.device:
        return self._params[0].device

    def _values(self, blocks: range) -> Iterator[Tensor]:
        for index, start, stop in self.table.slices(blocks):
            yield self._params[index].data.view(-1)[start:stop]

    def _write(self, blocks: range, memory: Tensor) -> None:
        offset = 0
        for value in self._values(blocks):
            value.view(torch.uint8).copy_(memory[offset : offset + value.nbytes])
            offset += value.nbytes

    # -- what ranks send each other ------------------------------------------------------------------------------

    @torch.no_grad()
    def pack_values(self, blocks: range) -> list[Any]:
        """Return the parameters in a run of blocks, to be sent."""
        return [blocks.start, blocks.stop, [value.cpu() for value in self._values(blocks)]]

    @torch.no_grad()
    def unpack_values(self, packed: list[Any]) -> None:
        """Take over parameters that `pack_values` returned on another rank."""
        start, stop, values = packed
        for mine, value in zip(self._values(range(start, stop)), values, strict=True):
            mine.copy_(value)

    def pack_state(self, blocks: range) -> list[Any]:
        """Return the state of a run of blocks that this rank keeps, to be sent."""
        self._take_loaded()
        present, packed = _by_parameter(self._own()), []
        for index, start, stop in self.table.slices(blocks):
            parts = (own.part(start, stop) for own in present.get(index, ()))
            packed += [[index, part.start, part.stop, dict(part.state)] for part in parts if part.start < part.stop]
        return packed

    def unpack_state(self, packed: Iterable[Any]) -> list[StateSlice]:
        """Return what `pack_state` returned on another rank."""
        return [
            StateSlice(index, start, stop, {key: self._to_device(value) for key, value in state.items()})
            for index, start, stop, state in packed
        ]

    def _to_device(self, value: Any) -> Any:
        return value.to(self._device) if isinstance(value, Tensor) and value.dim() else value

    @torch.no_grad()
    def install(self, shards: tuple[StateShard, ...], received: Sequence[StateSlice], *, is_new: bool = False) -> None:
        """Keep other shards from now on.

        Args:
            shards: Those.
            received: State of them that came from other ranks.
            is_new: Whether what this rank keeps now is nothing that counts.
        """
        self._take_loaded()
        present = _by_parameter([*received, *(() if is_new else self._own())])
        slices, state = [], defaultdict[Tensor, dict[str, Any]](dict)
        for run in runs_of(shards, self.table.total):
            for index, start, stop in self.table.slices(run):
                piece = nn.Parameter(self._params[index].data.view(-1)[start:stop], self._params[index].requires_grad)
                slices.append((index, start, stop, piece))
                if joined := _join(present.get(index, ()), start, stop):
                    state[piece] = joined
        self.shards, self._slices, self._state = shards, slices, state

    def _own(self) -> Iterator[StateSlice]:
        for index, start, stop, piece in self._slices:
            yield StateSlice(index, start, stop, self._state.get(piece, {}))

    # -- whole state, for checkpoints ----------------------------------------------------------------------------

    @contextmanager
    def whole(self, received: Sequence[StateSlice]) -> Iterator[None]:
        """Let the optimizer have the state of whole parameters inside the block.

        Args:
            received: The state that this rank does not keep.
        """
        self._take_loaded()
        optimizer = self._optimizer()
        assert optimizer is not None
        present = _by_parameter([*received, *self._own()])
        before, self._is_whole = optimizer.state, True
        optimizer.state = defaultdict(dict)
        for index, param in enumerate(self._params):
            state = _join(present.get(index, ()), 0, param.numel())
            if state:
                optimizer.state[param] = {
                    key: value.view(param.shape) if _is_by_element(value) else value for key, value in state.items()
                }
        try:
            yield
        finally:
            optimizer.state, self._is_whole = before, False

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Let `optimizer.state_dict()` inside the block leave out the state of parameters."""
        self._take_loaded()
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False

    def _take_loaded(self) -> None:
        """Keep what this rank needs of state that was loaded for whole parameters."""
        optimizer = self._optimizer()
        if optimizer is None or self._away is not None or self._is_whole or not (self._slices and optimizer.state):
            return
        loaded = {index: optimizer.state[param] for index, param in enumerate(self._params) if param in optimizer.state}
        # State of a parameter without dims looks like a count of steps; that of others tells.
        keys = {key for state in loaded.values() for key, value in state.items() if _is_by_element(value)}
        optimizer.state.clear()
        self._state.clear()
        for index, start, stop, piece in self._slices:
            param = self._params[index]
            flat = {
                key: _flat(value, param.shape) if key in keys else value for key, value in loaded.get(index, {}).items()
            }
            if flat:
                whole = StateSlice(index, 0, param.numel(), flat)
                self._state[piece] = _copied(whole.part(start, stop).state)

    def _refuse_part(self, _optimizer: Optimizer) -> None:
        if not self._is_whole:
            raise ConfigError(
                "optimizer.state_dict() was called, and each rank has a part of that state only, where ranks may leave "
                "and join (sharding with -n a:b). Save model and optimizer with px.save or px.Checkpointer, which "
                "gather it."
            )


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_by_element(value: Any) -> bool:
    """Return whether state has a number for each element; a count of steps has no dims."""
    return isinstance(value, Tensor) and value.dim() > 0


def _flat(value: Any, shape: torch.Size) -> Any:
    if not isinstance(value, Tensor):
        return value
    _check_size(value, tuple(shape))
    return value.contiguous().view(-1)


def _check_size(value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ConfigError(
            f"an optimizer keeps a tensor of shape {tuple(value.shape)} for parameters of shape {shape}, which cannot "
            "be sharded where ranks may leave and join (-n a:b). Use an optimizer that treats every element by itself "
            "(SGD, Adam, AdamW)."
        )


def _by_parameter(slices: Iterable[StateSlice]) -> dict[int, list[StateSlice]]:
    result: dict[int, list[StateSlice]] = {}
    for each in sorted(slices, key=lambda each: (each.index, each.start)):
        result.setdefault(each.index, []).append(each)
    return result


def _join(slices: Sequence[StateSlice], start: int, stop: int) -> dict[str, Any]:
    """Return the state of a run of elements, of its own memory, from slices in order that hold all of it, or none."""
    parts, offset = list[StateSlice](), start
    for each in slices:
        part = each.part(offset, stop)
        if part.start < part.stop:
            if part.start > offset:
                break
            parts.append(part)
            offset = part.stop
    if not any(part.state for part in parts):
        return {}
    if offset < stop or any(part.state.keys() != parts[0].state.keys() for part in parts):
        raise InternalError(f"elements {offset} to {stop} of a shard have no state, and those before have")
    return _copied(
        {
            key: torch.cat([part.state[key] for part in parts]) if _is_by_element(value) else value
            for key, value in parts[0].state.items()
        }
    )


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
