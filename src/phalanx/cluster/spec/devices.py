"""`Device`: peak FLOP/s, memory and bandwidth of accelerators, with presets for known GPUs (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.cluster.calibration.figures import Rates
from phalanx.errors import ConfigError
from phalanx.i18n import suggest, tr

TERA = 1e12
GIB = 2**30
FP8_OVER_BF16 = 0.709 / 0.803
"""Share of the peak that fp8 products reach over that of bf16 products: bursts on H100 SXM (table MAMF, see below)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One kind of accelerator. Dense rates; where a maker states sparse ones, half of them."""

    name: str
    flops: Mapping[str, float]
    """Peak matrix rate in FLOP/s by precision: `bf16`, `fp16`, `fp8`, `fp32`."""

    sustained: float
    """Share of the peak that large matrix products reach in training, where power and clocks give way; see
    docs/design/predict.md for how each was found."""

    memory: float
    """Bytes of device memory."""

    bandwidth: float
    """Bytes/s of device memory."""

    multiprocessors: int
    """Processors that tiles of a matrix product are dealt to."""

    link: float
    """Bytes/s to the other devices of a node, one way."""

    clock: float = 1.0
    """Share of the clock behind its peak that a power limit below the maker's leaves."""

    older_instructions: float = 1.0
    """Share of the peak that kernels written for the generation before reach, with its matrix instructions."""

    measured: Rates | None = None
    """What it takes, if it was measured; where that says nothing, its figures count."""

    def rate(self, precision: str) -> float:
        """Return the FLOP/s that large matrix products of a precision reach.

        Raises:
            ConfigError: If the device does not compute in that precision.
        """
        if precision not in self.flops:
            choices = ", ".join(self.flops)
            raise ConfigError(
                tr(
                    "Asked for {precision} on {device}, which computes in {known}. Choose one of them.",
                    precision=precision,
                    device=self.name,
                    known=choices,
                )
            )
        return self.flops[precision] * self.clock * self.sustained * (FP8_OVER_BF16 if precision == "fp8" else 1.0)


def _hopper(name: str, memory_gib: float, bandwidth: float, clock: float = 1.0) -> Device:
    return Device(
        name=name,
        flops={"bf16": 989 * TERA, "fp16": 989 * TERA, "fp8": 1979 * TERA, "fp32": 67 * TERA},
        sustained=H100,
        memory=memory_gib * GIB,
        bandwidth=bandwidth,
        multiprocessors=132,
        link=450e9,
        clock=clock,
        older_instructions=0.62,  # W. Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU" (2024): mma
    )


def _ampere(name: str, memory_gib: float, bandwidth: float, link: float, sustained: float) -> Device:
    return Device(
        name=name,
        flops={"bf16": 312 * TERA, "fp16": 312 * TERA, "fp32": 19.5 * TERA},
        sustained=sustained,
        memory=memory_gib * GIB,
        bandwidth=bandwidth,
        multiprocessors=108,
        link=link,
    )


# Sustained shares: A100 and H100 are fitted to training runs, B200 to products timed back to back. Short bursts of one
# product reach 0.869 (A100 SXM), 0.811 (A100 PCIe), 0.803 (H100 and H200 SXM), 0.776 (B200) of the peak (S. Bekman,
# Machine Learning Engineering, table MAMF, bf16).
A100, H100 = 0.82, 0.632
_PRESETS = (
    _ampere("A100-80GB-SXM", 80, 2.039e12, 300e9, A100),
    _ampere("A100-40GB-SXM", 40, 1.555e12, 300e9, A100),
    _ampere("A100-80GB-PCIe", 80, 1.935e12, 32e9, A100 * 0.811 / 0.869),
    _hopper("H100-80GB-SXM", 80, 3.35e12),
    _hopper("H100-96GB-SXM-500W", 96, 2.4e12, math.sqrt(500 / 700)),  # power rises as the clock's square
    _hopper("H200-141GB-SXM", 141, 4.8e12),
    _hopper("H800-80GB-SXM", 80, 3.35e12),
    Device(
        name="B200-180GB-SXM",
        flops={"bf16": 2250 * TERA, "fp16": 2250 * TERA, "fp8": 4500 * TERA, "fp32": 75 * TERA},
        sustained=0.48,  # large products back to back: 0.49 and backward 0.48 (SimuMax 1.2, table of B200)
        memory=180 * GIB,
        bandwidth=7.7e12,
        multiprocessors=148,
        link=900e9,
    ),
)
DEVICES = {device.name: device for device in _PRESETS}
"""Presets by their full name."""


USUAL = {
    "a100": "A100-80GB-SXM",
    "h100": "H100-80GB-SXM",
    "h200": "H200-141GB-SXM",
    "h800": "H800-80GB-SXM",
    "b200": "B200-180GB-SXM",
}
"""The device that a short name usually means, where a cluster is written in words."""


def find_preset(name: str) -> Device:
    """Return the device of a name; case does not count.

    Nothing is completed: an H20 is no H200.

    Raises:
        ConfigError: If no device has that name; names those that it could begin, or the nearest.
    """
    full_name = name.lower().replace("_", "-")
    for device in _PRESETS:
        if device.name.lower() == full_name:
            return device
    begun = [d.name for d in _PRESETS if d.name.lower().startswith(f"{full_name}-")]
    why = tr("which could be {names}", names=", ".join(begun)) if begun else tr("which is not known")
    near = "" if begun else suggest(name, [*DEVICES, *USUAL])
    raise ConfigError(
        tr(
            "Asked for the device {name!r}, {why}.{nearest} Known: {known}. Describe any other in a cluster file "
            "(docs/calibrate.md), as [[devices]] with the figures of its maker.",
            name=name,
            why=why,
            nearest=near,
            known=", ".join(DEVICES),
        )
    )
