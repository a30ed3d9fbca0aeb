"""`Device`: peak FLOP/s, memory and bandwidth of accelerators, with presets for known GPUs (pure)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

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

    source: str = ""
    """Where the figures of its maker are from."""

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


@dataclass(frozen=True, slots=True)
class _Form:
    """What a socket or a card of one chip has: memory in GiB and bytes/s, and bytes/s to its neighbours."""

    name: str
    memory_gib: float
    bandwidth: float
    link: float
    source: str


_PCIE_4, _PCIE_5 = 32e9, 64e9
"""Bytes/s of 16 lanes, one way. Bridges that join two or four cards count for nothing: rings of more pass the slots."""

_HOPPER, _AMPERE, _MI300 = "NVIDIA H100 data sheet", "NVIDIA A100 data sheet", "AMD Instinct MI300X data sheet"


def _build(form: _Form, tera: Mapping[str, float], sustained: tuple[float, float], processors: int) -> Device:
    """Return a device.

    Args:
        form: Of it.
        tera: Peak of matrix products in 10^12 FLOP/s by precision.
        sustained: Its share of these in 16 bit and in 8.
        processors: How many it has.
    """
    return Device(
        name=form.name,
        flops={precision: rate * TERA for precision, rate in tera.items()},
        sustained=sustained[0],
        sustained_fp8=sustained[1],
        memory=form.memory_gib * GIB,
        bandwidth=form.bandwidth,
        multiprocessors=processors,
        link=form.link,
        source=form.source,
    )


def _hopper(form: _Form, *, clock: float = 1.0) -> Device:
    device = _build(form, {"bf16": 989, "fp16": 989, "fp8": 1979, "fp32": 67}, (H100, H100_FP8), 132)
    return replace(device, clock=clock, older_instructions=_OLDER_THAN_HOPPER)


def _hopper_card(form: _Form, tera: float, fp32: float, watts: float, processors: int) -> Device:
    """Return a Hopper behind less power, of which each multiprocessor has its part; power rises as the clock's square.

    Its peak is at a lower clock too, so it sustains another share of it.
    """
    clock = math.sqrt((watts / processors) / (700 / 132)) * (989 / 132) / (tera / processors)
    flops = {"bf16": tera, "fp16": tera, "fp8": 2 * tera, "fp32": fp32}
    return replace(
        _build(form, flops, (H100 * clock, H100_FP8 * clock), processors), older_instructions=_OLDER_THAN_HOPPER
    )


def _blackwell(form: _Form, tera: float) -> Device:
    return _build(form, {"bf16": tera, "fp16": tera, "fp8": 2 * tera, "fp32": 75}, (B200, B200_FP8), 148)


def _ampere(form: _Form, sustained: float) -> Device:
    return _build(form, {"bf16": 312, "fp16": 312, "fp32": 19.5}, (sustained, 1.0), 108)


def _volta(name: str, memory_gib: float) -> Device:
    form = _Form(name, memory_gib, 0.9e12, 150e9, "NVIDIA V100 data sheet")
    return _build(form, {"fp16": 125, "fp32": 15.7}, (0.72, 1.0), 80)


def _graphics(form: _Form, tera: Mapping[str, float], watts: float, like: float, processors: int) -> Device:
    """Return a card for graphics: as many FLOP of 16 bit for a watt as the large chip of its process sustains.

    Args:
        form: Of it.
        tera: As `_build` takes it.
        watts: Of the card.
        like: 10^12 FLOP/s for a watt that the large chip sustains.
        processors: How many it has.
    """
    share = min(_NOTHING_GIVES_WAY, like * watts / tera["bf16"])
    return _build(form, tera, (share, share), processors)


def _ada(form: _Form, tera: float, fp8: float, fp32: float, watts: float, processors: int) -> Device:
    flops = {"bf16": tera, "fp16": tera, "fp8": fp8, "fp32": fp32}
    return _graphics(form, flops, watts, H100 * 989 / 700, processors)


def _cdna3(form: _Form, tera: float, fp8_tera: float) -> Device:
    """Return an AMD Instinct of the third generation, which sustains so many FLOP/s in 16 and in 8 bit.

    Those are AMD's own: "Measuring Max-Achievable FLOPs, part 2" (ROCm blog, February 2025), BF16 and FP8 of products
    at the clocks that power leaves.
    """
    flops = {"bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "fp32": 163.4}
    return _build(form, flops, (tera / 1307.4, fp8_tera / 2614.9), 304)


# Shares that large products sustain in training. Those of A100, H100 and B200 are fitted over published steps, between
# what is known before (`auto/cost/priors`). A device without a published step has what its power leaves of a burst.
A100, H100, B200 = 0.807, 0.631, 0.480
H100_FP8 = 0.549
B200_FP8 = B200
"""Published steps of B200 in 8 bit say 0.545, and those of 16 bit, which are of another machine, 0.47. By no measured
product does a device sustain a larger share in 8 bit than in 16: H100 0.71 and 0.80 (bursts), MI300X 0.49 and 0.54."""
_NOTHING_GIVES_WAY = 0.85
"""Of products of chips with so few FLOP that their power is enough."""

_OLDER_THAN_HOPPER = 0.62
"""W. Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU" (2024): mma."""

_A100_CARD = A100 * 0.811 / 0.869
_PRESETS = (
    _ampere(_Form("A100-80GB-SXM", 80, 2.039e12, 300e9, _AMPERE), A100),
    _ampere(_Form("A100-40GB-SXM", 40, 1.555e12, 300e9, _AMPERE), A100),
    _ampere(_Form("A100-80GB-PCIe", 80, 1.935e12, _PCIE_4, _AMPERE), _A100_CARD),
    _ampere(_Form("A100-40GB-PCIe", 40, 1.555e12, _PCIE_4, _AMPERE), _A100_CARD),
    _ampere(_Form("A800-80GB-SXM", 80, 2.039e12, 200e9, "NVIDIA A800 data sheet"), A100),
    _hopper(_Form("H100-80GB-SXM", 80, 3.35e12, 450e9, _HOPPER)),
    # Power rises as the clock's square.
    _hopper(_Form("H100-96GB-SXM-500W", 96, 2.4e12, 450e9, _HOPPER), clock=math.sqrt(500 / 700)),
    _hopper_card(_Form("H100-80GB-PCIe", 80, 2.0e12, _PCIE_5, _HOPPER), 756.5, 51, 350, 114),
    _hopper_card(_Form("H100-94GB-NVL", 94, 3.9e12, _PCIE_5, _HOPPER), 835.5, 60, 400, 132),
    _hopper(_Form("H200-141GB-SXM", 141, 4.8e12, 450e9, "NVIDIA H200 data sheet")),
    _hopper_card(_Form("H200-141GB-NVL", 141, 4.8e12, _PCIE_5, "NVIDIA H200 data sheet"), 835.5, 60, 600, 132),
    _hopper(_Form("H800-80GB-SXM", 80, 3.35e12, 200e9, "NVIDIA H800 data sheet")),
    _blackwell(_Form("B200-180GB-SXM", 180, 7.7e12, 900e9, "NVIDIA DGX B200 data sheet"), 2250),
    _blackwell(_Form("GB200-186GB-NVL72", 186, 8.0e12, 900e9, "NVIDIA GB200 NVL72 data sheet"), 2500),
    replace(
        _build(
            _Form("H20-96GB-SXM", 96, 4.0e12, 450e9, "NVIDIA H20 data sheet"),
            {"bf16": 148, "fp16": 148, "fp8": 296, "fp32": 44},
            (_NOTHING_GIVES_WAY, _NOTHING_GIVES_WAY),
            78,
        ),
        older_instructions=0.85,
    ),
    _volta("V100-32GB-SXM", 32),
    _volta("V100-16GB-SXM", 16),
    _ada(_Form("L40S-48GB-PCIe", 48, 0.864e12, _PCIE_4, "NVIDIA L40S data sheet"), 362.05, 733, 91.6, 350, 142),
    _ada(_Form("L40-48GB-PCIe", 48, 0.864e12, _PCIE_4, "NVIDIA L40 data sheet"), 181.05, 362, 90.5, 300, 142),
    _ada(_Form("L4-24GB-PCIe", 24, 0.3e12, _PCIE_4, "NVIDIA L4 data sheet"), 121, 242.5, 30.3, 72, 58),
    _graphics(
        _Form("A40-48GB-PCIe", 48, 0.696e12, _PCIE_4, "NVIDIA A40 data sheet"),
        {"bf16": 149.7, "fp16": 149.7, "fp32": 37.4},
        300,
        A100 * 312 / 400,
        84,
    ),
    _graphics(
        _Form("A10-24GB-PCIe", 24, 0.6e12, _PCIE_4, "NVIDIA A10 data sheet"),
        {"bf16": 125, "fp16": 125, "fp32": 31.2},
        150,
        A100 * 312 / 400,
        72,
    ),
    _cdna3(_Form("MI300X-192GB-OAM", 192, 5.3e12, 448e9, _MI300), 708, 1273),
    _cdna3(_Form("MI325X-256GB-OAM", 256, 6.0e12, 448e9, "AMD Instinct MI325X data sheet"), 843, 1519),
)
DEVICES = {device.name: device for device in _PRESETS}
"""Presets by their full name."""


_FORMS = {"sxm2": "sxm", "sxm3": "sxm", "sxm4": "sxm", "sxm5": "sxm", "sxm6": "sxm", "hgx": "sxm", "dgx": "sxm"}
_MAKERS = ("nvidia", "tesla", "amd", "instinct", "gpu", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6")


@cache
def find_preset(name: str) -> Device:
    """Return the device of a name: a family, such as `h100`, alone or with memory, form or power, in any order.

    The first preset of a family is its usual one. A family is matched whole: an H30 is no H200.

    Raises:
        ConfigError: If no device has that name; names those of its family, or the nearest.
    """
    words = re.split(r"[-_ ]+", re.sub(r"(\d)[-_ ]?gi?b?\b", r"\1gb", name.lower()))
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
