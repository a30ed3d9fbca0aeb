"""`Stack`: the kernels and habits of a family of training software, by name or read from a run's `software`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from phalanx.auto.cost.kernels import Generation

StackName = Literal["megatron-2021", "megatron-2022", "megatron-core", "mosaicml", "pytorch", "generic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """What one family of software does otherwise than another on the same devices."""

    attention: Generation
    """Kernels of fused attention: the first in Triton; those common since 2023, for A100; a device's own."""

    fuses: bool
    """Whether norms, rotary embeddings and gates have a kernel each; else an operator each, unless compiled."""

    loss: Literal["fused", "megatron", "pytorch", "mosaicml"]
    """Which loss: it says how often logits are moved, and how many bytes of each are kept."""

    adds_in_products: bool = False
    """Whether products add to the gradients of earlier micro-batches, and collectives of a cut layer's gradients run
    beside the gradients of its weights: Megatron since the end of 2021."""

    gathers_sends: bool = False
    """Whether tensor-parallel ranks that all have an activation send a part each, which the next stage gathers:
    Megatron up to 2022 and DeepSpeed. Megatron Core cuts sends with sequence parallel alone."""

    pipelines: Literal["torch", "megatron", "megatron-core", "any"] = "any"
    """Whose rules there are for micro-batches of stages (`RunSpec.order_rules`, `find_schedule_conflict`)."""

    gathers_beside_forward: bool = False
    """Whether parameters that a sharded optimizer updated are gathered beside the next forward pass; else before it.
    Megatron Core's `overlap-param-gather`, which NeMo sets with the overlap of gradients."""

    stops_checkpoints: bool = False
    """Whether recomputation stops before a block's last product and selective recomputation is of every second one, as
    in PyTorch; else it is of whole blocks, and of the scores of attention."""


_GENERIC = Stack(attention="common", fuses=True, loss="megatron", gathers_sends=True)
_EARLY = replace(_GENERIC, pipelines="megatron")
STACKS: dict[StackName, Stack] = {
    "megatron-2021": _EARLY,
    "megatron-2022": replace(_EARLY, adds_in_products=True),
    "megatron-core": Stack(
        attention="native",
        fuses=True,
        loss="fused",
        adds_in_products=True,
        pipelines="megatron-core",
        gathers_beside_forward=True,
    ),
    "mosaicml": Stack(attention="first", fuses=False, loss="mosaicml", stops_checkpoints=True, pipelines="torch"),
    "pytorch": Stack(attention="common", fuses=False, loss="pytorch", stops_checkpoints=True, pipelines="torch"),
    "generic": _GENERIC,
}
"""Stacks by name. `generic` is what runs get that name none: the kernels of Megatron that most others have too."""

_WORDS: tuple[tuple[StackName, tuple[str, ...]], ...] = (
    ("mosaicml", ("mosaicml", "llm-foundry", "composer")),
    ("megatron-core", ("transformer engine", "transformerengine", "megatron-core", "megatron core", "mcore", "nemo")),
    ("megatron-core", ("megatron bridge", "megatron-bridge", "cudnn")),
    ("generic", ("deepspeed", "neox")),
    ("megatron-2021", ("megatron-lm, 2021", "megatron-lm 2021", "megatron-lm, april 2021", "ptd-p")),
    ("pytorch", ("torchtitan", "fsdp", "lightning", "litgpt", "accelerate", "hugging face", "pytorch")),
    ("megatron-2022", ("megatron",)),
)
_SINCE_TRANSFORMER_ENGINE = ("2023", "2024", "2025", "2026")


@cache
def recognise(software: str, *, has_8_bit: bool) -> StackName | None:
    """Return the stack that words name; None if they name none.

    Args:
        software: Free text.
        has_8_bit: Whether the device computes in 8 bit: Megatron has Transformer Engine there.
    """
    words = software.lower()
    if "te" in words.replace(",", " ").replace("+", " ").split():
        return "megatron-core"
    for stack, names in _WORDS:
        if any(name in words for name in names):
            is_later = has_8_bit or any(year in words for year in _SINCE_TRANSFORMER_ENGINE)
            return "megatron-core" if stack == "megatron-2022" and is_later else stack
    return None
