"""Lines for people, on standard output of rank 0."""

from __future__ import annotations

import sys


def show(rank: int, line: str) -> None:
    """Write a line to standard output, on rank 0 only."""
    if rank == 0:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
