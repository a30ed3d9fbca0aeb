"""What the entry looks at when a script has ended."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.cluster.role.role import Role
from phalanx.errors import RoleError
from phalanx.launch.process import entry


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("FLAGS_selected_gpus", "6")
    # The launcher may have been configured in this process, which stops propagation.
    monkeypatch.setattr(logging.getLogger("phalanx"), "propagate", True)
    return caplog


def test_a_set_device_to_another_ranks_card_warns(second_of_two: pytest.LogCaptureFixture) -> None:
    entry._check_gpu(0)
    assert "computed on GPU 4, but the launcher gave it 6. Choose GPUs with --gpus" in second_of_two.text


@pytest.mark.parametrize("index", [1, None])
def test_the_own_card_and_no_card_at_all_are_fine(second_of_two: pytest.LogCaptureFixture, index: int | None) -> None:
    entry._check_gpu(index)
    assert second_of_two.text == ""


def record(folder: Path) -> None:
    error = ValueError("a bug of the script")
    entry._write_error_record({"rank": 0, "error_file": str(folder / "error.worker.0.json")}, ValueError, error, None)


def test_an_error_is_recorded_in_one_file(tmp_path: Path) -> None:
    record(tmp_path)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["message"] == "a bug of the script"


def test_ctrl_c_while_the_error_is_recorded_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def server_that_met_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    role = Role(kind="server", rank=1, world_size=2, endpoint="127.0.0.1:1", job_id="test")
    current = SimpleNamespace(role=role)
    context = SimpleNamespace(is_initialized=lambda: True, current=lambda: current, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "phalanx.comm.context", context)
    monkeypatch.delitem(sys.modules, "phalanx.ps.server.main", raising=False)


@pytest.mark.parametrize("stop", [None, SystemExit(), SystemExit(0)])
def test_a_server_that_ends_well_without_serving_fails(
    server_that_met_the_others: None, monkeypatch: pytest.MonkeyPatch, stop: SystemExit | None
) -> None:
    def script(path: str) -> None:
        if stop is not None:
            raise stop

    monkeypatch.setattr(entry, "_run_as_main", script)
    with pytest.raises(RoleError, match=r"ended on server 1 without serving. Call fleet.init_server\(\) and"):
        entry._run_script_to_end("train.py")


def test_a_server_whose_script_ends_with_a_code_of_its_own_keeps_it(
    server_that_met_the_others: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(path: str) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(entry, "_run_as_main", script)
    assert entry._run_script_to_end("train.py") == 3
