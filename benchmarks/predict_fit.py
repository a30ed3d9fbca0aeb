"""Fit the constants of `phalanx predict` over published step times, robustly and towards what is known of each.

Rows of one source share what no constant says, so a source counts as ten rows at most. Times are linear in the
logarithms of the constants over the few percent that a fit moves them: one Jacobian serves the fit of every family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.auto.cost.constants import DEFAULT, Constants
from phalanx.auto.cost.priors import PRIORS, kind_of, move
from phalanx.auto.predict.prediction import predict
from phalanx.auto.predict.run_file import read_runs
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.cluster.spec.devices import DEVICES

PUBLISHED = Path(__file__).parent / "published" / "runs.jsonl"
UNSEEN = PUBLISHED.with_name("unseen.jsonl")

FITTED = tuple(name for name, prior in PRIORS.items() if prior.is_fitted)
ROWS_OF_SOURCE = 10
SPREAD_OF_ROWS = 0.05
"""Standard deviation of a row's logarithm, as a fit weighs it; rows further away count less."""

_STEP = 0.02


def read_published() -> list[RunSpec]:
    """Return the published runs, those in doubt too.

    vTrain's rows of a single node are left out: they are the output of a simulator (docs/design/predict.md).
    """
    runs: list[RunSpec] = []
    for path in (PUBLISHED, UNSEEN):
        with path.open() as lines:
            runs += read_runs(lines, path.name)
    return [run for run in runs if "vTrain single-node" not in run.source]


def read_measured() -> list[RunSpec]:
    """Return the published runs with a measured step time, without doubt."""
    return [run for run in read_published() if not run.doubt and run.measured_step_time_s]


def source_of(run: RunSpec) -> str:
    """Return the body of work that published a row."""
    return run.source.split()[0].split("/")[0]


def software_of(run: RunSpec) -> str:
    """Return the generation of a row's software."""
    return f"{run.stack_name}, DeepSpeed" if "deepspeed" in run.software.lower() else str(run.stack_name)


def shape_of(run: RunSpec) -> str:
    """Return the kind of parallelism that marks a row."""
    par = run.parallel
    kinds = {"sequence": par.cp, "interleaved": par.vpp, "stages": par.pp, "tensor": par.tp}
    return next((kind for kind, degree in kinds.items() if degree > 1), "data")


def size_of(run: RunSpec) -> str:
    """Return the order of magnitude of a row's model."""
    steps = ((1e9, "below 1B"), (1e10, "1 to 10B"), (1e11, "10 to 100B"))
    return next((name for below, name in steps if run.model.parameters < below), "over 100B")


FAMILIES = {
    "source": source_of,
    "hardware": lambda run: kind_of(run.device),
    "parallel shape": shape_of,
    "software": software_of,
    "model size": size_of,
    "precision": lambda run: "fp8" if run.precision == "fp8" else "16 bit",
}
"""How rows are put into families; each is left out whole."""


def seconds(run: RunSpec) -> float:
    """Return the measured seconds of a step."""
    measured = run.measured_step_time_s
    assert measured is not None
    return measured


def shipped(name: str) -> float:
    """Return the value of a constant as it is."""
    kind, _, precision = name.partition(" ")
    device = next((device for device in DEVICES.values() if device.name.startswith(kind)), None)
    if device is None:
        return float(getattr(DEFAULT, name))
    return device.sustained_fp8 if precision else device.sustained


def predict_with(run: RunSpec, logs: np.ndarray) -> float:
    """Return the logarithm of a step's seconds with other constants: logarithms of `FITTED`, in their order."""
    device, constants = run.device, DEFAULT
    for name, value in zip(FITTED, np.exp(logs), strict=True):
        device, constants = move(name, value / shipped(name), device, constants)
    cluster = run.cluster.model_copy(update={"figures": device})
    return float(np.log(predict_seconds(run.model_copy(update={"cluster": cluster}), constants)))


def predict_seconds(run: RunSpec, constants: Constants = DEFAULT) -> float:
    """Return the predicted seconds of a step."""
    return predict(run, constants, interval=False).step_time_s


def _tie(logs: np.ndarray, tied: np.ndarray) -> np.ndarray:
    """Return a matrix from free constants to all: a device has no larger share of its peak in 8 bit than in 16."""
    for place, name in enumerate(FITTED):
        kind, _, precision = name.partition(" ")
        if precision and logs[place] > logs[FITTED.index(kind)] and tied[place, place]:
            tied = tied.copy()
            tied[place] = 0.0
            tied[place, FITTED.index(kind)] = 1.0
    return tied


@dataclass(frozen=True)
class Fit:
    """Published rows, and how their predictions move with the constants."""

    runs: Sequence[RunSpec]
    measured: np.ndarray
    """Logarithms of seconds, one a row."""

    centre: np.ndarray
    """Logarithms of predicted seconds with the constants as they are, one a row."""

    slopes: np.ndarray
    """Change of a row's logarithm by that of a constant: rows by constants."""

    def solve(self, rows: np.ndarray) -> np.ndarray:
        """Return the logarithms of the constants that these rows and the priors say."""
        start = np.log([shipped(name) for name in FITTED])
        prior = np.log([PRIORS[name].value for name in FITTED])
        spread = np.array([PRIORS[name].spread for name in FITTED])
        counts = Counter(source_of(self.runs[row]) for row in rows)
        weights = np.array([min(1, ROWS_OF_SOURCE / counts[source_of(self.runs[row])]) for row in rows])
        slopes, target = self.slopes[rows], (self.measured - self.centre)[rows] + self.slopes[rows] @ start
        logs, tied = start, np.eye(len(FITTED))
        for _ in range(30):
            off = (target - slopes @ logs) / SPREAD_OF_ROWS
            scale = np.sqrt(weights / np.sqrt(1 + off**2)) / SPREAD_OF_ROWS
            left = np.concatenate([slopes * scale[:, None], np.diag(1 / spread)])
            right = np.concatenate([target * scale, prior / spread])
            logs = tied @ np.linalg.lstsq(left @ tied, right, rcond=None)[0]
            tied = _tie(logs, tied)
        return logs

    def without(self, rows: np.ndarray) -> np.ndarray:
        """Return the logarithms of the constants that all rows but these say."""
        return self.solve(np.setdiff1d(np.arange(len(self.runs)), rows))


def linearise(runs: Sequence[RunSpec]) -> Fit:
    """Return the rows with the slopes of their predictions at the constants as they are."""
    start = np.log([shipped(name) for name in FITTED])
    centre = np.array([predict_with(run, start) for run in runs])
    moved = [[predict_with(run, start + _STEP * unit) for unit in np.eye(len(FITTED))] for run in runs]
    measured = np.log([seconds(run) for run in runs])
    return Fit(runs, measured, centre, (np.array(moved) - centre[:, None]) / _STEP)
