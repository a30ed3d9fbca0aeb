"""`px.predict`: analytic step time and memory of a transformer training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.auto.cost.constants import DEFAULT, Constants
from phalanx.auto.predict.interval import estimate_interval
from phalanx.auto.predict.memory_model import compute_footprint
from phalanx.auto.predict.run_file import read_run
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.predict.step_seconds import StepSeconds
from phalanx.cluster.spec.devices import GIB
from phalanx.i18n import Labels

BREAKDOWN: Labels = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "pipeline_send": "pipeline send",
    "pipeline_bubble": "pipeline bubble",
    "gradients": "exchange of gradients",
    "optimizer": "optimizer",
}
"""What the parts of a predicted step are called."""


USABLE = 0.95
"""Share of a device's memory that a run may be predicted to take. A driver shows 0.985 to 0.99 of what a maker states;
the rest is for what a prediction is off by. Published runs that ran are predicted to take up to 0.947."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a run takes. Seconds and bytes of the slowest rank and of the peak rank."""

    name: str
    step_time_s: float
    step_time_interval_s: tuple[float, float] | None
    """Seconds between which the step lies in four of five runs; None where it was not asked for."""

    tokens_per_s_per_device: float
    model_tflops_per_device: float
    memory_gib: float
    fits: bool
    breakdown: dict[str, float]
    """Seconds of a step by cause, under `*_s`; GiB by what they hold, under `*_gib`."""


def predict(run: RunSpec | Mapping[str, Any], constants: Constants = DEFAULT, *, interval: bool = True) -> Prediction:
    """Return time and memory of one step of a run spec. Pure: no devices are looked at.

    Args:
        run: A `RunSpec`, or a mapping as a line of a file of runs has it (docs/predict.md).
        constants: The physical quantities to compute with.
        interval: Whether to estimate between which times a step lies, which takes as long as 30 predictions.

    Raises:
        ConfigError: If the run cannot be; says which key, what was found and what is known.
    """
    run = run if isinstance(run, RunSpec) else read_run(run)
    seconds = StepSeconds(run, constants).breakdown()
    total, footprint = sum(seconds.values()), compute_footprint(run)
    per_device = run.batch.whole * run.model.seq / run.parallel.ranks / total
    return Prediction(
        name=run.name,
        step_time_s=total,
        step_time_interval_s=estimate_interval(run, constants) if interval else None,
        tokens_per_s_per_device=per_device,
        model_tflops_per_device=per_device * run.model.flops_per_token() / 1e12,
        memory_gib=footprint.total / GIB,
        fits=footprint.total <= USABLE * run.device.memory,
        breakdown=seconds | {f"{name}_gib": getattr(footprint, name) / GIB for name in footprint.__dataclass_fields__},
    )
