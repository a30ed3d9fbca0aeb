"""`PRIORS`: what is known of each constant before any run is seen, from data sheets and public micro-benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from phalanx.auto.cost.constants import Constants
from phalanx.cluster.spec.devices import Device


@dataclass(frozen=True, slots=True)
class Prior:
    """A constant before any run is seen."""

    value: float
    spread: float
    """Standard deviation of its logarithm."""

    unit: str
    source: str
    is_fitted: bool = False
    """Whether runs move it; else it stays at its value."""


_TABLES = "SimuMax 1.2, tables of A100 and B200"
_BURST = "S. Bekman, table MAMF: one product by itself"
PRIORS: Mapping[str, Prior] = {
    "A100": Prior(0.80, 0.06, "of peak", f"{_BURST}, 0.87, less 8 % for the power limit (estimated)", is_fitted=True),
    "H100": Prior(0.64, 0.06, "of peak", f"{_BURST}, 0.80, less 20 % for the power limit (estimated)", is_fitted=True),
    "B200": Prior(
        0.515,
        0.06,
        "of peak",
        f"{_TABLES}: 0.485; {_BURST}, 0.776, less 25 % for the power limit: 0.58",
        is_fitted=True,
    ),
    "H100 fp8": Prior(
        0.56, 0.08, "of peak", f"{_BURST}, 0.709, less what the power limit takes of bf16", is_fitted=True
    ),
    "B200 fp8": Prior(
        0.45, 0.12, "of peak", "share in bf16, times the ratio of fp8 to bf16 on an H100 (estimated)", is_fitted=True
    ),
    "backward_rate": Prior(0.97, 0.04, "of forward", f"{_TABLES}: 0.742 and 0.707 against 0.741", is_fitted=True),
    "contention": Prior(0.20, 0.7, "s/s", "Galvatron, overlap profiles: 0.13", is_fitted=True),
    "tile_start": Prior(
        200, 0.5, "elements", "estimated: filling and draining a pipeline of four tiles, each 32 to 64 deep"
    ),
    "stream": Prior(0.80, 0.12, "of bandwidth", f"{_TABLES}: 0.91 and 0.67"),
    "cast_bytes": Prior(
        6.0,
        0.3,
        "bytes",
        "counted: read in 16 bit for its maximum (2), read to be cast (2), written twice, also transposed (2)",
    ),
    "fused_cast_bytes": Prior(
        1.7, 0.3, "bytes", "counted: as cast_bytes, averaged over operands, of which most are written in 8 bit at once"
    ),
    "kernel_gap_s": Prior(4e-6, 0.5, "s", "estimated: the end of a kernel and the start of the next"),
    "launch_s": Prior(3.5e-5, 0.3, "s", f"{_TABLES}: 40 us and 30 us"),
    "compiled_launch_s": Prior(1e-5, 0.5, "s", "estimated: a launch without Python"),
    "attention": Prior(0.58, 0.08, "of peak", f"{_TABLES}: 0.62 and 0.55; FlashAttention 3: 0.62"),
    "attention_backward": Prior(0.46, 0.08, "of peak", f"{_TABLES}: 0.51 and 0.43; FlashAttention 3: 0.52"),
    "first_attention": Prior(0.60, 0.15, "of rate", "FlashAttention 2: 1.7 to 2 times as fast as FlashAttention 1"),
    "attention_tail": Prior(0.65, 0.3, "of a block", f"{_TABLES}: 4 to 64 heads"),
    "score_passes": Prior(1.0, 0.15, "of bytes", "estimated: each pass over the scores reads and writes memory"),
    "link": Prior(0.80, 0.08, "of link", "vTrain and Galvatron, all-reduce of 64 MiB to 1 GiB over 2, 4 and 8 A100"),
    "network": Prior(0.85, 0.15, "of ports", "estimated: headers, and rings over several ports"),
    "link_start_s": Prior(3e-5, 0.5, "s", "vTrain, all-reduce of 1 MiB, two ranks"),
    "link_hop_s": Prior(7e-6, 0.5, "s", "vTrain, all-reduce of 1 MiB, eight ranks"),
    "network_hop_s": Prior(1.4e-5, 0.5, "s", "NCCL 2.18 to 2.23, tuning.cc: ring between nodes"),
    "micro_batch_s": Prior(1e-3, 0.7, "s", "estimated: data, schedule and Python"),
    "step_s": Prior(5e-3, 0.7, "s", "estimated: norms, loss scaling, the loop"),
    "optimizer_bytes": Prior(30, 0.2, "bytes", "fused Adam: parameter, gradient, two states, master"),
}
"""Constants of `auto/cost/constants` by name, and the share of its peak that a kind of device sustains."""


UNSEEN_SPREAD = 0.12
"""Standard deviation of the logarithm of the share of its peak that a device of no kind in `PRIORS` sustains: that of
B200 in 8 bit, which is estimated from other devices too."""


def kind_of(device: Device) -> str:
    """Return the kind of a device, as `PRIORS` has it: an H200 and an H800 compute as an H100 does, and so on.

    Cards, of which no step was published, are of no kind of `PRIORS`: their share of the peak follows from their power.
    """
    kind, *parts = device.name.split("-")
    if not {"PCIe", "NVL"}.isdisjoint(parts):
        return device.name
    return {"H200": "H100", "H800": "H100", "A800": "A100", "GB200": "B200"}.get(kind, kind)


def move(name: str, ratio: float, device: Device, constants: Constants) -> tuple[Device, Constants]:
    """Return a device and constants with one of `PRIORS` multiplied; the same where it is another device's.

    Args:
        name: The constant.
        ratio: What it is multiplied by.
        device: The device.
        constants: The constants.
    """
    if hasattr(constants, name):
        return device, replace(constants, **{name: getattr(constants, name) * ratio})
    kind, _, precision = name.partition(" ")
    if kind != kind_of(device):
        return device, constants
    if precision:
        return replace(device, sustained_fp8=device.sustained_fp8 * ratio), constants
    return replace(device, sustained=device.sustained * ratio), constants
