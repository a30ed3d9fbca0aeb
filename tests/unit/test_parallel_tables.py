"""Workers that save tables to one folder take turns."""

from __future__ import annotations

import fcntl
import os

from phalanx.parallel import tables


def test_a_worker_that_waits_for_another_one_to_save_says_so(tmp_path, monkeypatch):
    other = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(other, fcntl.LOCK_EX)
    said = []

    def say(text, *values):
        said.append(text % values)
        os.close(other)  # the other one has saved

    monkeypatch.setattr(tables.logger, "info", say)
    with tables._alone_in(tmp_path):
        assert said == [f"save: waiting until another worker has saved to {tmp_path}"]
    with tables._alone_in(tmp_path):
        assert len(said) == 1, "nobody to wait for"
