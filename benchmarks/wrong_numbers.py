"""Faults that make numbers wrong, as data: how to cause each, and what must be named. Add one by adding a row.

`wrong_numbers_rank.py` has the code of each. The tests run some of them, `bench_verify` all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tool = Literal["verify", "nan", "replay"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongNumber:
    """One fault, and what the tool must say of it."""

    name: str
    """What `--fault` of the script is given."""

    tool: Tool = "verify"
    engine: str = "loop"
    cause: str
    """Of `verify` the cause in its verdict; of the others a part of the message."""

    tensor: str = ""
    """The tensor or module that must be named; empty where there is none."""

    step: int = 0
    ranks: tuple[int, ...] | None = None
    """The ranks at fault; None where they need not be named."""


VERIFY = (
    WrongNumber(name="wrong seed", cause="seed", tensor="first.weight"),
    WrongNumber(name="seed from clock", engine="ddp", cause="seed", tensor="first.weight"),
    WrongNumber(name="missing all-reduce", cause="missing all-reduce", tensor="first.weight"),
    WrongNumber(name="bias left out", cause="missing all-reduce", tensor="head.bias"),
    WrongNumber(name="no_sync left on", engine="ddp", cause="no_sync left on", tensor="first.weight", step=2),
    WrongNumber(name="summed", cause="gradient scale", tensor="first.weight"),
    WrongNumber(name="divided twice", cause="gradient scale", tensor="first.weight"),
    WrongNumber(name="not sharded", cause="data not sharded", ranks=(0, 1)),
    WrongNumber(name="shuffled by rank", cause="order of data"),
    WrongNumber(name="shuffled by world", engine="ddp", cause="order of data"),
    WrongNumber(name="batch per rank", engine="ddp", cause="global batch"),
    WrongNumber(name="other samples", cause="order of data", step=2),
    WrongNumber(name="uneven batch", cause="uneven batch", tensor="first.weight"),
    WrongNumber(name="uneven batch", engine="ddp", cause="uneven batch", tensor="first.weight"),
    WrongNumber(name="batch norm", engine="ddp", cause="batch-norm statistics", tensor="norm"),
    WrongNumber(name="dropout", engine="ddp", cause="random numbers", tensor="drop"),
    WrongNumber(name="unseeded augmentation", engine="ddp", cause="other data"),
    WrongNumber(name="labels of other rows", cause="loss"),
    WrongNumber(name="loss divided by world", cause="gradient scale", tensor="first.weight"),
    WrongNumber(name="other forward on one rank", cause="forward pass", tensor="scale"),
    WrongNumber(name="flipped bit", cause="corrupt gradient", tensor="second.weight", step=2, ranks=(1,)),
    WrongNumber(name="flipped bit", engine="ddp", cause="corrupt gradient", tensor="second.weight", step=2, ranks=(1,)),
    WrongNumber(
        name="corrupt bucket", engine="ddp", cause="corrupt gradient", tensor="first.weight", step=2, ranks=(1,)
    ),
    WrongNumber(name="frozen on one rank", cause="parameter frozen on some ranks", tensor="second.weight", ranks=(1,)),
    WrongNumber(
        name="used on one rank only", cause="parameter used on some ranks only", tensor="extra.bias", ranks=(1,)
    ),
    WrongNumber(name="clipped before the reduction", cause="reduction of gradients", tensor="first.weight"),
    WrongNumber(name="bfloat16 on the wire", cause="reduction of gradients", tensor="first.weight"),
    WrongNumber(name="detached on one rank", cause="backward pass", tensor="head.weight"),
    WrongNumber(name="rate by rank", cause="optimizer settings", tensor="first.weight"),
    WrongNumber(name="rate by world", engine="ddp", cause="optimizer settings", tensor="first.weight"),
    WrongNumber(name="weight written on one rank", cause="update", tensor="extra.bias", step=3, ranks=(1,)),
)

NOT_FINITE = (
    WrongNumber(
        name="inf in one sample",
        tool="nan",
        engine="px",
        cause="infinity first appeared",
        tensor="for sample 37 of the dataset",
    ),
    WrongNumber(name="nan deep inside", tool="nan", cause="computed by log", tensor="module deep (Deep)"),
    WrongNumber(name="nan beside a mask", tool="nan", cause="computed by log", tensor="module deep (Deep)"),
    WrongNumber(name="nan in backward", tool="nan", engine="ddp", cause="SqrtBackward0", tensor="module deep (Deep)"),
    WrongNumber(name="division by zero", tool="nan", engine="px", cause="computed by div", tensor="module deep (Deep)"),
    WrongNumber(name="nan label weight", tool="nan", engine="ddp", cause="computed by NllLoss ", tensor="the loss"),
    WrongNumber(name="exploding", tool="nan", cause="The update before made it", tensor="parameter", step=1),
)

REPLAY = (
    WrongNumber(
        name="flipped bit of a replica",
        tool="replay",
        engine="px",
        cause="gradients",
        tensor="first.weight",
        step=2,
        ranks=(1,),
    ),
    WrongNumber(
        name="flipped bit",
        tool="replay",
        engine="px",
        cause="sum of gradients on rank 1",
        tensor="first.weight",
        step=2,
    ),
)

ALL = (*VERIFY, *NOT_FINITE, *REPLAY)
