"""A machine's measured figures, and how they are read between their points."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.calibration.figures import (
    FULL_INNER,
    SCHEMA,
    Grid,
    Measured,
    Rates,
    measured_file,
    never_falling,
    read_measured,
)
from phalanx.errors import ConfigError

AXES = ((1.0, 8.0, 64.0), (16.0, 256.0))
POINTS = list(itertools.product(*AXES))


def a_grid(seconds: tuple[float, ...], axes: tuple[tuple[float, ...], ...] = AXES) -> Grid:
    return Grid(axes=axes, seconds=never_falling(axes, seconds), powers=(1.0,) * len(axes))


def some_rates(**changes: Any) -> Rates:
    cube = ((1.0, 64.0),) * 3
    line = ((64.0, 65536.0),)
    grids = {
        "matmul fp32": a_grid(tuple(1e-6 * 2**i for i in range(8)), cube),
        "matmul bf16": a_grid(tuple(5e-7 * 2**i for i in range(8)), cube),
        "convolution backward": a_grid(tuple(1e-5 * 2**i for i in range(8)), cube),
        "pointwise forward": a_grid(tuple(3e-6 * 2**i for i in range(8)), cube),
        "depthwise forward": a_grid((5e-6, 1e-4), line),
        "elementwise forward": a_grid((1e-6, 4e-6), line),
        "gelu forward": a_grid((2e-6, 8e-6), line),
        "optimizer adam": a_grid((1e-5, 1e-3), line),
        "all_reduce shm 2": a_grid((2e-5, 1e-4), line),
    }
    host = {"launch_s": 2e-6, "backward_launch_s": 3e-6, "checkpoint_s": 1e-4, "selective_op_s": 1e-5}
    return Rates.model_validate({"threads": 1, **host, "grids": grids} | changes)


def some_machine() -> Measured:
    return Measured(host="here", processor="p", cores=2, memory=2**30, torch="2", date="2026", rates={1: some_rates()})


@given(st.lists(st.floats(1e-7, 10), min_size=6, max_size=6))
def test_a_grid_is_exact_at_its_points_and_never_falls(seconds: list[float]) -> None:
    grid = a_grid(tuple(seconds))
    for point, value in zip(POINTS, grid.seconds, strict=True):
        assert grid.at(*point) == pytest.approx(value)
    assert grid.seconds[-1] == seconds[-1], "what was measured last is not exceeded by less work"


@given(st.lists(st.floats(1e-7, 10), min_size=6, max_size=6), st.lists(st.floats(0.1, 1e4), min_size=4, max_size=4))
def test_more_work_never_takes_less_time(seconds: list[float], places: list[float]) -> None:
    grid = a_grid(tuple(seconds))
    less, more = zip(sorted(places[:2]), sorted(places[2:]), strict=True)
    assert grid.at(*less) <= grid.at(*more) * (1 + 1e-9)


def test_beyond_the_end_time_grows_with_the_power_and_before_the_start_it_stays() -> None:
    grid = Grid(axes=((4.0, 16.0),), seconds=(1.0, 2.0), powers=(2.0,))
    assert grid.at(32) == pytest.approx(8)
    assert grid.at(1) == grid.at(0) == pytest.approx(1)
    assert grid.at(8) == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": (1.0,)}, "1 seconds do not fit"),
        ({"axes": ((16.0, 4.0),)}, "axes must rise"),
        ({"seconds": (2.0, 1.0)}, "seconds fall"),
        ({"seconds": (0.0, 1.0)}, "seconds must be above 0"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid.model_validate({"axes": ((4.0, 16.0),), "seconds": (1.0, 2.0), "powers": (1.0,)} | changes)


def test_rates_find_what_was_measured() -> None:
    rates = some_rates(shared={"shm": 0.5})
    assert rates.matmul_s(64, 64, 64) == pytest.approx(128e-6)
    assert rates.matmul_s(64, 64, 64, "bf16") == pytest.approx(64e-6)
    assert rates.operator_s("gelu", 64) == pytest.approx(2e-6)
    assert rates.operator_s("tanh", 64) == pytest.approx(1e-6), "unknown operators count as element-wise"
    assert rates.optimizer_s("adam", 2 * 65536, 2) == pytest.approx(2e-3)
    assert rates.optimizer_s("adam", 0, 0) == 0
    assert rates.collective_s("all_reduce", 64, 2) == pytest.approx(2e-5)
    assert rates.collective_s("all_reduce", 64, 1) == 0
    assert (rates.contention(), rates.contention("gloo")) == (0.5, 0)
    with pytest.raises(ConfigError, match=r"'all_reduce gloo 4', which was not measured.*calibrate -n N"):
        rates.collective_s("all_reduce", 64, 4, "gloo")


def test_products_with_a_small_inner_dimension_have_a_table_of_their_own() -> None:
    plain = some_rates()
    narrow = {"narrow matmul fp32": a_grid((1e-3,) * 4, ((16.0, 2048.0),) * 2)}
    rates = some_rates(grids=plain.grids | narrow)
    assert [rates.matmul_s(64, 64, k) for k in (2, 8, 15)] == pytest.approx([1e-3] * 3)
    # Two ranks have 15.5 of 31 features on average, and one of them has 16.
    for k in (0.5, 1, 15.5, FULL_INNER, 64):
        assert rates.matmul_s(64, 64, k) == plain.matmul_s(64, 64, k)
    assert rates.matmul_s(16, 64, 8, batch=4) == plain.matmul_s(16, 64, 8, batch=4)
    assert rates.matmul_s(64, 64, 8, "bf16") == plain.matmul_s(64, 64, 8, "bf16"), "it was not measured"


def test_convolutions_have_tables_by_their_kind() -> None:
    rates = some_rates()
    assert rates.conv_s(64, 64, 64, backward=True) == pytest.approx(128e-5)
    assert rates.conv_s(64, 64, 64, 4, pointwise=True) == pytest.approx(4 * 384e-6)
    assert rates.conv_s(64, 64, 64, pointwise=True, dtype="bf16") == pytest.approx(192e-6), "as products are"
    assert rates.conv_s(1024, 1, 9, 64) == pytest.approx(1e-4)


def test_a_machine_is_kept_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = some_machine()
    made.save(measured_file())
    assert read_measured() == made
    assert [path.name for path in measured_file().parent.iterdir()] == [measured_file().name]
    assert made.at(1).threads == 1
    with pytest.raises(ConfigError, match=r"Asked for 4 ranks of here, which was measured with 1\..*calibrate -n 4"):
        made.at(4)


def spoiled(change: Callable[[dict[str, Any]], Any]) -> str:
    content = json.loads(some_machine().model_dump_json(by_alias=True))
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (spoiled(lambda c: c.update(schema=SCHEMA + 1)), rf"asked for version {SCHEMA}, found {SCHEMA + 1}"),
        (spoiled(lambda c: c.pop("schema")), "found None"),
        ("[]", "found None"),
        ("{", "cannot be read"),
        (spoiled(lambda c: c.pop("cores")), r"cores: Field required"),
        (spoiled(lambda c: c["rates"]["1"].update(threads=0)), r"rates\.1\.threads: Input should be greater"),
    ],
)
def test_files_that_do_not_fit_say_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"m\.json.*{message}(?s:.*)calibrate"):
        read_measured(tmp_path / "m.json")


def test_a_machine_that_was_not_measured_is_told_how(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not there\. Measure this machine with `phalanx calibrate`"):
        read_measured(tmp_path / "none.json")
