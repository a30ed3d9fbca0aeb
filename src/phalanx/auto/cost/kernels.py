"""`Kernels`: roofline cost of matrix products, fused attention and memory-bound kernels (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from phalanx.auto.cost.constants import Constants
from phalanx.cluster.spec.devices import Device

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.70))
"""Rows, columns and relative rate of the tiles that libraries choose from."""

ROWS = 128
"""Rows of queries that one block of fused attention works on."""

Generation = Literal["first", "common", "native"]
"""Kernels of fused attention: the first in Triton; those common since 2023, for A100; a device's own."""

_ATTENTION = (8, 1024, 64)
"""Heads, length and width at which a measured machine's attention is read."""

WIDTHS = (32, 64, 96, 128, 192, 256)
"""Widths of heads that kernels of fused attention are written for (FlashAttention 2)."""

_OPERAND_BYTES = {"fp8": (1, 2), "fp32": (4, 4)}
"""Bytes of an element that a product reads and writes, where not both are of 16 bit."""

_FEW_WAVES = 6
_SHORTEST_SPLIT = 512


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels of one device in one precision."""

    device: Device
    constants: Constants
    precision: str
    fuses_casts: bool = False
    """Whether the kernels before a product write its operands in 8 bit."""

    def in_half(self) -> Kernels:
        """Return the kernels of what stays in 16 bit when the layers compute in 8."""
        return Kernels(self.device, self.constants, "bf16") if self.precision == "fp8" else self

    def matmul(
        self, m: float, n: float, k: float, *, batch: float = 1, backward: bool = False, aligned: float = 1.0
    ) -> float:
        """Return the seconds of `batch` products of (m, k) by (k, n).

        The product is cut into tiles, dealt to the multiprocessors in waves: a last wave that is not full costs as
        much as a full one. Few tiles are cut along k too. No product is faster than its memory traffic.
        """
        if self.device.measured is not None:
            least = 2 * batch * m * n * k / self.device.rate(self.precision)
            return max(
                least, self.device.measured.matmul_s(batch * m, n, k, "fp32" if self.precision == "fp32" else "bf16")
            )
        constants = self.constants
        # In 8 bit operands are cast into the order that products read them in.
        slower = constants.backward_rate if backward and self.precision != "fp8" else 1.0
        rate = self.device.rate(self.precision) * slower
        best = min(self._tiled(m, n, k, batch, tile) for tile in TILES) / rate / aligned * self.device.multiprocessors
        read, written = _OPERAND_BYTES.get(self.precision, (2, 2))
        moved = batch * (read * (m * k + k * n) + written * m * n)
        seconds = max(best, self.streamed(moved)) + constants.kernel_gap_s
        if self.precision != "fp8":
            return seconds
        # The activations of a product are cast each time, as they are and transposed; weights once a step.
        cast = constants.fused_cast_bytes if self.fuses_casts else constants.cast_bytes
        return seconds + self.streamed(cast * batch * m * k) + constants.kernel_gap_s

    def _tiled(self, m: float, n: float, k: float, batch: float, tile: tuple[int, int, float]) -> float:
        rows, columns, relative = tile
        processors = self.device.multiprocessors
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * max(1, round(batch))
        split = 1.0
        if tiles < processors and k >= 2 * _SHORTEST_SPLIT:
            split = min(processors // tiles, k // _SHORTEST_SPLIT)
        waves = tiles * split / processors
        # Over many waves tiles end at different times, and on average half a wave is lost.
        waves = math.ceil(waves) if waves <= _FEW_WAVES else waves + 0.5
        return waves * 2 * rows * columns * (k / split + self.constants.tile_start) / relative

    def attention(
        self,
        flops: float,
        *,
        width: float = 128,
        backward: bool = False,
        longest: float = 0.0,
        generation: Generation = "common",
    ) -> float:
        """Return the seconds of fused attention.

        Args:
            flops: FLOP of its forward pass, masked scores left out.
            width: Of a head.
            backward: The backward pass, which computes the scores again: 2.5 times the work.
            longest: FLOP of the block of rows that sees most keys: one multiprocessor works on it, in the end alone.
            generation: Which kernels.
        """
        constants, device = self.constants, self.device
        if device.measured is not None:
            measured = device.measured.attention_s(*_ATTENTION, backward=backward)
            return flops / (2 * _ATTENTION[0] * _ATTENTION[1] ** 2 * _ATTENTION[2]) * measured
        share = constants.attention_backward if backward else constants.attention
        share *= {"first": constants.first_attention, "common": 1.0, "native": 1.0}[generation]
        if generation != "native" and self.precision != "fp32":  # whose instructions are no matrix instructions
            share *= device.older_instructions
        work = flops * _kernel_width(width) / width + constants.attention_tail * longest * device.multiprocessors
        return (
            work * (2.5 if backward else 1.0) / (device.flops[self.precision] * device.clock * share)
            + constants.kernel_gap_s
        )

    def streamed(self, moved: float) -> float:
        """Return the seconds to move bytes between memory and the multiprocessors."""
        return moved / (self.device.bandwidth * self.constants.stream)


def _kernel_width(width: float) -> float:
    """Return the width that a kernel of fused attention computes for heads of this one: it is written for a few."""
    return next((written for written in WIDTHS if width <= written), WIDTHS[-1] * math.ceil(width / WIDTHS[-1]))


def alignment(width: float, element_bytes: int = 2) -> float:
    """Return the rate of products of matrices with rows of so many elements over that of whole loads.

    Loads are of 16 bytes where the bytes of a row are a multiple of 16, and of fewer where they are not.
    """
    whole = 16 // element_bytes
    elements = math.gcd(round(width), whole) if width == round(width) else 1
    return math.sqrt(elements / whole)
