"""`phalanx calibrate` on real ranks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from launching import BIN, launch
from phalanx.cluster.calibration.figures import (
    BACKENDS,
    LAYER_KINDS,
    Kind,
    Measured,
    Precision,
    Rates,
    Sharding,
    read_measured,
)
from phalanx.diagnose.calibrate.command import combine_rates, rank_counts, table
from phalanx.diagnose.calibrate.command import command as calibrate
from phalanx.errors import BackendError

pytestmark = pytest.mark.dist


def check_rates(found: Measured) -> None:
    assert found.ranks == (1, 2)
    for ranks in found.ranks:
        rates = found.at(ranks)
        assert rates.threads == max(1, found.cores // ranks), "what ranks get under phalanx run"
        assert 0 < rates.launch_s < 1e-2
        assert 0 < rates.checkpoint_s < 1
        assert 0 < rates.selective_op_s < 1
        for small, large in pairwise((1, 64, 4096)):
            assert 0 < rates.matmul_s(small, small, small, "bf16") <= rates.matmul_s(large, large, large, "bf16")
        assert {f"narrow matmul {dtype}" for dtype in get_args(Precision)} <= set(rates.grids)
        assert 0 < rates.conv_s(8192, 16, 144) < 100
        assert 0 < rates.conv_s(8192, 64, 64, pointwise=True, backward=True) < 100
        assert 0 < rates.conv_s(8192, 1, 9, 64) < 100
        assert 0 < rates.attention_s(8, 32, 32, backward=True) < 100
        assert 0 < rates.operator_s("softmax", 2**16, backward=True) < 100
        assert 0 < rates.optimizer_s("momentum", 1e5, 4) < 100
    for backend in BACKENDS:
        assert all(0 < found.at(2).collective_s(kind, 2**16, 2, backend) < 100 for kind in get_args(Kind))
        assert found.at(2).contention(backend) >= 0
    for layer_kind in LAYER_KINDS:
        assert 0 < found.at(2).layer_s(layer_kind, 2**16, 2) < 100
    assert 0 < found.at(2).placed_s(2, 0, 2) <= found.at(2).placed_s(2, 2, 2) < 100
    assert 0 < found.at(2).waiting_s(1e-3, 2) < 100
    assert 0 < found.at(2).averaged_s(2) < 1
    for how in get_args(Sharding):
        assert 0 < found.at(2).sharded_s(how, 2**18, 4, 2) < 100


def test_a_machine_is_measured_kept_and_used(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path), "PHALANX_LANG": "zh"}
    run = launch(tmp_path, "calibrate", "--quick", timeout_s=110.0, program=(str(BIN / "phalanx"),), environment=cache)
    assert run.code == 0, run.err
    assert "矩阵乘" in run.out
    (kept,) = (tmp_path / "phalanx" / "measured").iterdir()
    check_rates(read_measured(kept))
    assert sorted(tmp_path.iterdir()) == [tmp_path / "phalanx"], "no log is left behind"
    columns = [str(column.header) for column in table(read_measured(kept)).columns]
    assert len(columns) == 3


def test_ranks_that_fail_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_STOP_GRACE_S", "never")
    found = CliRunner().invoke(calibrate, ["-n", "2", "--quick", "--out", str(tmp_path / "m.json")])
    assert isinstance(found.exception, BackendError)
    assert "1 ranks could not be measured" in str(found.exception)
    assert "PHALANX_STOP_GRACE_S" in str(found.exception), "what the launcher said"
    assert not (tmp_path / "m.json").exists()


def test_counts_go_up_in_twos() -> None:
    assert [rank_counts(most) for most in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8)]


def test_figures_of_ranks_come_to_their_medians() -> None:
    def sheet(launch_s: float) -> Rates:
        cube = {"axes": [[1.0]], "seconds": [launch_s], "powers": [1.0]}
        host = {"backward_launch_s": 1.0, "launch_s": launch_s, "checkpoint_s": 1.0, "selective_op_s": 1.0}
        content = {"threads": 2, **host, "shared": {"shm": launch_s}}
        return Rates.model_validate_json(json.dumps(content | {"grids": {"x": cube}}))

    made = combine_rates([sheet(1.0), sheet(2.0), sheet(9.0)])
    assert made == sheet(2.0)
    assert combine_rates([sheet(1.0), sheet(2.0)]).launch_s == 1.5
