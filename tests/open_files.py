"""The descriptors that this process has open, for tests that none is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Make sure that a block opens nothing that it does not close; what it closes besides is garbage of other tests."""
    before = _open_files()
    yield
    assert not _open_files() - before


def _open_files() -> set[tuple[str, str]]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.add((path.name, os.readlink(path)))
        except FileNotFoundError:  # the descriptor of this listing itself
            continue
    return found
