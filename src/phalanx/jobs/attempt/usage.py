"""`Usage`: CPU, memory and GPU usage samples of an attempt, one file per node."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from phalanx.files import write_atomically
from phalanx.jobs import paths

LIMIT = 1 << 20
"""Bytes of a node's file after which every second of its samples is dropped."""

Count = Annotated[int, Field(ge=0, le=2**63)]


@dataclass(frozen=True)
class Sample:
    """What the processes of one node use at a moment.

    Attributes:
        number: Of this sample, counted from 0; those that were thinned out are missing.
        time: Seconds since the epoch, by the clock of the node.
        cpu: Cores in use, on average since the sample before.
        memory: Bytes of resident memory; a page that several processes share counts once (PSS).
        peak: The most of `memory` so far.
        gpu: GPUs in use on average: the sum of the utilisation of those they compute on. None where there is none.
        gpu_memory: Bytes that they hold of these GPUs.
    """

    number: Count
    time: FiniteFloat
    cpu: FiniteFloat
    memory: Count
    peak: Count
    gpu: FiniteFloat | None = None
    gpu_memory: Count | None = None


_SAMPLE = TypeAdapter(Sample)


@dataclass(frozen=True)
class Usage:
    """Samples of one node in order, and the `offset` that yields what comes after them."""

    node: int
    samples: list[Sample]
    offset: int


def append(folder: Path, node: int, sample: Sample) -> None:
    """Add a sample to the file of `node`. One process writes it.

    Raises:
        OSError: If the file cannot be written.
    """
    file = paths.usage(folder, node)
    with file.open("ab") as opened:
        opened.write(json.dumps(asdict(sample)).encode() + b"\n")
        is_full = opened.tell() > LIMIT
    if is_full:
        _thin(file)


def _thin(file: Path) -> None:
    """Drop every second sample: the older ones are, the further apart they come to lie. A reader sees all or half."""
    lines = file.read_bytes().splitlines(keepends=True)
    write_atomically(file, b"".join(lines[(len(lines) - 1) % 2 :: 2]))


def read(folder: Path, node: int, offset: int = 0) -> Usage:
    """Return the samples of `node` from number `offset` on.

    Args:
        folder: The attempt's folder.
        node: One that left no file, as in a pod, has no samples.
        offset: As an earlier call returned it; a negative one counts from the end: -1 is the last sample.
    """
    samples: list[Sample] = []
    for line in reversed(_lines(paths.usage(folder, node))):
        sample = _sample(line)
        if sample is None:
            continue
        if sample.number < offset or len(samples) == -offset > 0:
            break
        samples.append(sample)
    samples.reverse()
    return Usage(node, samples, samples[-1].number + 1 if samples else max(offset, 0))


def _lines(file: Path) -> list[bytes]:
    """The whole lines of a file, of its end where it is longer than ours ever are."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - 2 * LIMIT))
            text = opened.read(2 * LIMIT)
    except FileNotFoundError:
        return []
    return text[: text.rfind(b"\n") + 1].splitlines()


def _sample(line: bytes) -> Sample | None:
    """The sample on a line, or None for half a one, or what the job itself wrote there."""
    try:
        return _SAMPLE.validate_json(line)
    except ValidationError:
        return None
