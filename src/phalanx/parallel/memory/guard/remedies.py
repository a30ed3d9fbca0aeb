"""`Remedies`: what a rank does in turn when its memory runs out; each changes no bit of a result, and stays.

First it frees what nothing refers to, then it recomputes the first half of the model's blocks in the backward pass
(whose activations are kept for longest, and in convolutional networks are the largest), all blocks, and the modules in
them too; on a GPU it then moves to host memory what recomputed blocks keep.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import phalanx.comm.context as context_of
from phalanx import accelerator
from phalanx.comm.events.event_file import append_event
from phalanx.parallel.data.forward_hooks import Forward, wrap_forward, wrap_innermost_forward
from phalanx.parallel.memory.activation_checkpointing import recomputed
from phalanx.parallel.memory.blocks import Block, find_blocks, inner_blocks
from phalanx.parallel.memory.failures import MemoryFailure
from phalanx.parallel.memory.free_memory import block_return, free_caches
from phalanx.plan.rules.recompute import recomputed_modules
from phalanx.plan.value import ModuleRule

logger = logging.getLogger("phalanx.parallel")


@dataclass(frozen=True, slots=True)
class Remedy:
    """One of them, applied."""

    name: str
    """What the event file calls it."""

    effect: str
    """What a rank does from now on, for the log."""

    setting: str
    """What a strategy has to say to begin with it; empty where none does."""


FREE_CACHES = Remedy("free_caches", "frees what nothing refers to", "")
"""What comes first, and costs nothing later."""

_WHERE = {
    "forward": "a forward pass",
    "backward": "a backward pass",
    "loss": "the loss after a forward pass",
    "step": "the optimizer's step",
}
"""In the words of the log, by phase."""


def report_remedy(remedy: Remedy, failure: MemoryFailure, subject: str, lost_s: float) -> None:
    """Say in the log and in the event file what is done about memory that ran out.

    Args:
        remedy: What is done.
        failure: What ran out.
        subject: The class of the model or optimizer.
        lost_s: Seconds of what is done again.
    """
    rank = context_of.current().rank
    logger.warning(
        "rank %d ran out of memory in %s of %s (%s). It %s, and repeats the failed computation; the results stay bit "
        "for bit the same.%s",
        rank,
        _WHERE[failure.phase],
        subject,
        failure.amounts,
        remedy.effect,
        f" To use this from the start: {remedy.setting}." if remedy.setting else "",
    )
    append_event(
        "out_of_memory",
        rank=rank,
        phase=failure.phase,
        remedy=remedy.name,
        requested=failure.requested,
        free_bytes=failure.free_bytes,
        lost_s=round(lost_s, 4),
    )


_WHOLLY = ModuleRule(match="*", recompute="full")

Step = tuple[Remedy, Callable[[], None]]


class Remedies:
    """The remedies that a model's rank has not applied yet.

    Args:
        model: The model, as it is trained.
        rules: Of its Plan: what they recompute already is left alone.
        device: Where it computes.
    """

    def __init__(self, model: nn.Module, rules: Sequence[ModuleRule], device: torch.device) -> None:
        self._model, self._rules, self._device = weakref.ref(model), rules, device
        self._steps: list[Step] | None = None

    def remain(self) -> bool:
        """Return whether there is one to apply."""
        return bool(self._to_come())

    def apply_next(self) -> Remedy:
        """Apply the next one; what the model's passes compute is the same with it."""
        remedy, apply = self._to_come().pop(0)
        apply()
        free_caches(self._device)
        return remedy

    def setting(self) -> str:
        """Return what a strategy has to say to recompute all blocks from the start; empty where none does."""
        model = self._model()
        return "" if model is None else _setting(self._blocks(model))

    def _to_come(self) -> list[Step]:
        if self._steps is None:  # looked for when memory has run out, not before
            model = self._model()
            self._steps = [] if model is None else list(self._list(model))
        return self._steps

    def _list(self, model: nn.Module) -> Iterator[Step]:
        yield FREE_CACHES, lambda: block_return.tighten(self._device)
        blocks = self._blocks(model)
        half, cut = len(blocks) // 2, dict[nn.Module, SegmentedRun]()
        for part, amount in ((blocks[:half], f"{half} of its {len(blocks)} blocks"), (blocks[half:], "all its blocks")):
            if part:
                setting = _setting([*blocks[:half], *part])
                yield (
                    Remedy("recompute", f"recomputes {amount} in backward from now on", setting),
                    partial(_recompute, part, cut),
                )
        inner = [within for block in blocks for within in inner_blocks(block)]
        if inner:
            effect = "recomputes the modules in its blocks one by one from now on"
            yield Remedy("recompute_inner", effect, _setting(blocks)), partial(_recompute, inner, cut)
        whole = [block for block in blocks if block.run is None]
        if whole and self._device.type != "cpu":
            setting = _setting(whole).removesuffix("}") + ', "enable_offload": True}'
            yield (
                Remedy("offload", "keeps the inputs of its blocks in host memory from now on", setting),
                partial(_offload, whole),
            )

    def _blocks(self, model: nn.Module) -> list[Block]:
        """Return the blocks that the Plan does not recompute already."""
        names = ((name, isinstance(module, (nn.ModuleList, nn.ModuleDict))) for name, module in model.named_modules())
        done = tuple(f"{name}." for name in recomputed_modules(self._rules, names))
        return [block for block in find_blocks(model) if not f"{block.name}.".startswith(done)]


def _recompute(blocks: Sequence[Block], cut: dict[nn.Module, SegmentedRun]) -> None:
    for block in blocks:
        if block.run is None:
            wrap_forward(block.module, recomputed, block.module, _WHOLLY)
        elif block.module in cut:
            cut[block.module].runs.append(block.run)
        else:
            cut[block.module] = SegmentedRun([block.run])
            wrap_innermost_forward(block.module, _in_segments, block.module, cut[block.module])


@dataclass(slots=True)
class SegmentedRun:
    """The parts of a sequence of layers that are recomputed."""

    runs: list[tuple[int, int]]


def _in_segments(_forward: Forward, sequence: nn.Sequential, segments: SegmentedRun, x: Any) -> Any:
    layers, at = list(sequence), 0
    for start, end in segments.runs:
        for layer in layers[at:start]:
            x = layer(x)
        part = nn.Sequential(*layers[start:end])
        x = recomputed(part.forward, part, _WHOLLY, x)
        at = end
    for layer in layers[at:]:
        x = layer(x)
    return x


def _offload(blocks: Sequence[Block]) -> None:
    for block in blocks:
        wrap_forward(block.module, _kept_on_host)


def _kept_on_host(forward: Forward, *inputs: Any, **named: Any) -> Any:
    with save_on_cpu(pin_memory=accelerator.can_pin()):
        return forward(*inputs, **named)


def _setting(blocks: Sequence[Block]) -> str:
    """Return what a strategy says to recompute blocks; empty where they are no modules of their own."""
    if not blocks or any(block.run is not None for block in blocks):
        return ""
    patterns = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", block.name) for block in blocks)
    names = ", ".join(f'"{pattern}"' for pattern in patterns)
    return f'strategy.recompute = True and strategy.recompute_configs = {{"checkpoints": [{names}]}}'
