"""`Device`: peak FLOP/s, memory and bandwidth of accelerators, with presets for known GPUs (pure)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phalanx.cluster.calibration.figures import Rates
from phalanx.cluster.calibration.interpolation import at_speed
from phalanx.errors import ConfigError
from phalanx.i18n import suggest, tr

TERA = 1e12
GIB = 2**30


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

    sustained_fp8: float = 1.0
    """The same share of products in 8 bit, which give way to other limits."""

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
        return self.flops[precision] * self.clock * (self.sustained_fp8 if precision == "fp8" else self.sustained)

    def at_speed(self, speed: float) -> Device:
        """Return a device that takes 1 / `speed` times as long for everything but what it sends."""
        if speed == 1:
            return self
        return replace(
            self,
            name=f"{self.name} at {100 * speed:.3g} %",
            flops={precision: speed * rate for precision, rate in self.flops.items()},
            bandwidth=speed * self.bandwidth,
            measured=None if self.measured is None else at_speed(self.measured, speed),
        )


def _hopper(name: str, memory_gib: float, bandwidth: float, *, clock: float = 1.0, link: float = 450e9) -> Device:
    return Device(
        name=name,
        flops={"bf16": 989 * TERA, "fp16": 989 * TERA, "fp8": 1979 * TERA, "fp32": 67 * TERA},
        sustained=H100,
        sustained_fp8=H100_FP8,
        memory=memory_gib * GIB,
        bandwidth=bandwidth,
        multiprocessors=132,
        link=link,
        clock=clock,
        older_instructions=0.62,  # W. Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU" (2024): mma
    )


def _blackwell(name: str, memory_gib: float, bandwidth: float, tera: float) -> Device:
    return Device(
        name=name,
        flops={"bf16": tera * TERA, "fp16": tera * TERA, "fp8": 2 * tera * TERA, "fp32": 75 * TERA},
        sustained=B200,
        sustained_fp8=B200_FP8,
        memory=memory_gib * GIB,
        bandwidth=bandwidth,
        multiprocessors=148,
        link=900e9,
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


# Shares that large products sustain in training. Those of A100, H100 and B200 are fitted over published steps, between
# what is known before (`auto/cost/priors`). A device without a published step has what its power leaves of a burst.
A100, H100, B200 = 0.803, 0.629, 0.469
H100_FP8, B200_FP8 = 0.548, 0.545
_PRESETS = (
    _ampere("A100-80GB-SXM", 80, 2.039e12, 300e9, A100),
    _ampere("A100-40GB-SXM", 40, 1.555e12, 300e9, A100),
    _ampere("A100-80GB-PCIe", 80, 1.935e12, 32e9, A100 * 0.811 / 0.869),
    _ampere("A800-80GB-SXM", 80, 2.039e12, 200e9, A100),
    _hopper("H100-80GB-SXM", 80, 3.35e12),
    _hopper("H100-96GB-SXM-500W", 96, 2.4e12, clock=math.sqrt(500 / 700)),  # power rises as the clock's square
    _hopper("H200-141GB-SXM", 141, 4.8e12),
    _hopper("H800-80GB-SXM", 80, 3.35e12, link=200e9),
    _blackwell("B200-180GB-SXM", 180, 7.7e12, 2250),
    _blackwell("GB200-186GB-NVL72", 186, 8.0e12, 2500),
    Device(
        name="H20-96GB-SXM",
        flops={"bf16": 148 * TERA, "fp16": 148 * TERA, "fp8": 296 * TERA, "fp32": 44 * TERA},
        sustained=0.85,  # so few FLOP that power gives way to nothing
        sustained_fp8=0.85,
        memory=96 * GIB,
        bandwidth=4.0e12,
        multiprocessors=78,
        link=450e9,
        older_instructions=0.85,
    ),
    Device(
        name="V100-32GB-SXM",
        flops={"fp16": 125 * TERA, "fp32": 15.7 * TERA},
        sustained=0.72,
        memory=32 * GIB,
        bandwidth=0.9e12,
        multiprocessors=80,
        link=150e9,
    ),
)
DEVICES = {device.name: device for device in _PRESETS}
"""Presets by their full name."""


_FORMS = {"sxm2": "sxm", "sxm3": "sxm", "sxm4": "sxm", "sxm5": "sxm", "sxm6": "sxm", "hgx": "sxm", "dgx": "sxm"}
_MAKERS = ("nvidia", "tesla", "gpu", "hbm2", "hbm2e", "hbm3", "hbm3e")


def find_preset(name: str) -> Device:
    """Return the device of a name: a family, such as `h100`, alone or with memory, form or power, in any order.

    The first preset of a family is its usual one. A family is matched whole: an H30 is no H200.

    Raises:
        ConfigError: If no device has that name; names those of its family, or the nearest.
    """
    words = re.split(r"[-_ ]+", name.lower())
    parts = {_FORMS.get(word, word) for word in words if word and word not in _MAKERS}
    families = [device for device in _PRESETS if device.name.lower().split("-")[0] in parts]
    for device in families:
        if parts <= set(device.name.lower().split("-")):
            return device
    others = ", ".join(device.name for device in families)
    why = tr("which is none of {names}", names=others) if families else tr("which is not known")
    known_families = dict.fromkeys(device.split("-")[0].lower() for device in DEVICES)
    near = "" if families else suggest(name, [*DEVICES, *known_families])
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
