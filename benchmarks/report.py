"""What every benchmark shares: the machine, interleaved pairs, and the one JSON object it prints."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One case: our median, the peer's, and the ratio ours / peer pair by pair."""

    case: str
    unit: str
    better: str
    ours: float
    peer: float
    peer_name: str
    ratio: dict[str, float]


def measure_pairs(
    case: str,
    ours: Callable[[], float],
    peer: Callable[[], float],
    *,
    pairs: int,
    unit: str,
    better: str,
    peer_name: str,
) -> Row:
    """Measure both sides in turn, swapping who goes first, so that a slow moment of the machine hits both."""
    found: list[tuple[float, float]] = []
    for index in range(pairs):
        if index % 2:
            second = peer()
            found.append((ours(), second))
        else:
            found.append((ours(), peer()))
    return row_of_pairs(case, found, unit=unit, better=better, peer_name=peer_name)


def row_of_pairs(case: str, pairs: Sequence[tuple[float, float]], *, unit: str, better: str, peer_name: str) -> Row:
    """Return the row of pairs of ours and the peer's."""
    ratios = [ours / peer for ours, peer in pairs]
    return Row(
        case=case,
        unit=unit,
        better=better,
        ours=statistics.median(ours for ours, _ in pairs),
        peer=statistics.median(peer for _, peer in pairs),
        peer_name=peer_name,
        ratio={"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    )


def machine() -> dict[str, Any]:
    """Return what numbers of this machine must be read with."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
    }


def arguments(cases: Sequence[str]) -> argparse.Namespace:
    """Parse the flags every benchmark takes; `cases` of the result is a checked list."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, cases)
    parsed = parser.parse_args()
    check_cases(parser, parsed, cases)
    return parsed


def add_arguments(parser: argparse.ArgumentParser, cases: Sequence[str]) -> None:
    """Add the flags every benchmark takes, for one that has more."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="toy size, only to see that it works")
    parser.add_argument("--cases", default=",".join(cases), help="which, separated by commas")


def check_cases(parser: argparse.ArgumentParser, parsed: argparse.Namespace, cases: Sequence[str]) -> None:
    """Make `cases` of what was parsed a checked list."""
    parsed.cases = parsed.cases.split(",")
    unknown = set(parsed.cases) - set(cases)
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(cases)}")


def show(bench: str, rows: Sequence[Row], *, as_json: bool) -> None:
    """Print the rows as one JSON object or as a table."""
    if as_json:
        print(json.dumps({"bench": bench, "machine": machine(), "rows": [asdict(row) for row in rows]}))
        return
    for row in rows:
        low, high = row.ratio["min"], row.ratio["max"]
        print(
            f"{row.case}: {row.ours:.3g} {row.unit}, {row.peer_name} {row.peer:.3g} {row.unit}, "
            f"ratio {row.ratio['median']:.2f} ({low:.2f}-{high:.2f}), {row.better} is better"
        )
