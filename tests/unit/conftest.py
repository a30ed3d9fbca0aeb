"""What unit tests share."""

from __future__ import annotations

import os

import pytest

from phalanx import files


class _Libc:
    """Syncs nothing."""

    def syncfs(self, _: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def nothing_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no unit test wait for the disk: `syncfs` waits for all that the machine writes, also for other tests.

    What is synced, and what follows when it fails, are tests with an `os.fsync` or a `syncfs` of their own.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(files, "_libc", _Libc())
