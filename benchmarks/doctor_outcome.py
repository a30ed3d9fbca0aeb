"""`Outcome`: what was said of one fault, and whether that names the rank and the line (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from benchmarks.doctor_faults import Fault

Found: TypeAlias = Literal["line", "rank", "nothing"]
"""What is right: rank and line or cause, the rank alone, or neither."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one tool said of one fault."""

    fault: str
    found: Found
    seconds: float | None
    """From the fault to the words; None when nothing was said."""

    said: str


def find_in_tracebacks(fault: Fault, output: str) -> Found:
    """Return what the tracebacks of a job's output name; torch writes the rank before each of their lines."""
    shown = {
        rank: [line for line in output.splitlines() if line.startswith(f"[rank{rank}]:")] for rank in fault.culprits
    }
    if not all(any("Traceback" in line for line in lines) for lines in shown.values()):
        return "nothing"
    frames = [line for lines in shown.values() for line in lines]
    has_lines = all(any(f'train.py", line {number},' in frame for frame in frames) for number in fault.lines[:2])
    return "line" if fault.lines and has_lines else "rank"


def _find_in_verdict(fault: Fault, said: str) -> Found:
    ranks = all(re.search(rf"\branks?\b[^;]*\b{rank}\b", said) for rank in fault.culprits)
    is_first = len(fault.culprits) > 1 or said.startswith(f"rank {fault.culprits[0]} ")
    if not (ranks and is_first):
        return "nothing"
    # A report may be of one of the two lines of a loop; ranks that contradict each other have one each.
    return "line" if all(re.search(rf"train\.py:{line}\b", said) for line in fault.lines[:2]) else "rank"


def find_in_report(fault: Fault, said: str) -> Found:
    """Return what a report of ours names, by the kind of report. A fault without a line has a cause to name."""
    if fault.verdict == "hang":
        return _find_in_verdict(fault, said)
    (culprit,) = fault.culprits
    named = {"slow": f" for rank {culprit} ", "failure": f"rank {culprit} failed first", "lost": f"(node {culprit})"}
    if named[fault.verdict] not in said:
        return "nothing"
    lines = all(re.search(rf'train\.py(:|", line ){line}\b', said) for line in fault.lines)
    return "line" if lines and all(words in said for words in fault.words) else "rank"
