"""A process that is killed while it downloads."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from file_server import CONTENT, PROXIES, serving
from phalanx.data import download

pytestmark = pytest.mark.fault

SCRIPT = "import sys; from phalanx.data import download; download(sys.argv[1], sys.argv[2], sha256=sys.argv[3])"


def test_the_next_process_takes_the_lock_and_goes_on_where_a_killed_one_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    digest = hashlib.sha256(CONTENT).hexdigest()
    part = tmp_path / ".data.bin.part"
    with serving() as server:
        server.ends_after, server.stalls = 2**19, threading.Event()
        arguments = [sys.executable, "-c", SCRIPT, server.url("data.bin"), str(tmp_path), digest]
        with subprocess.Popen(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}) as loader:
            deadline = time.monotonic() + 60
            while not (part.exists() and part.stat().st_size > 2**18):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            loader.kill()
        assert not (tmp_path / "data.bin").exists()
        server.ends_after = None
        server.stalls.set()
        server.stalls = None
        kept = part.stat().st_size
        assert download(server.url("data.bin"), tmp_path, sha256=digest).read_bytes() == CONTENT
    assert server.asked[1:] == [("data.bin", f"bytes={kept}-")]
    assert not part.exists()
