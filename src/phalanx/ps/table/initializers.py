"""`initial_values`: initial values of rows, a function of seed, table and id.

An id's hash and the table's seed give the row's own number; its stream of 64-bit words is a counter sent through
`mix64`. The native table computes the same: uniform and constant values to the bit; normal values, which go through
the C library's logarithm and cosine, to one unit in the last place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.data.sampling.hash64 import GOLDEN, WORD, Words, mix64
from phalanx.ps.table.rules import Constant, CountFilter, Init, Normal, Probability, TableSpec

ADMISSION = 0xD1B54A32D192ED03
ROUNDING = 0x8CB92BA72F3D8DD7


def row_numbers(mixed_keys: Words, seed: int) -> Words:
    """Return each row's own number, from the ids' hashes (`placement.mixed`) and the table's seed. Shape (n,)."""
    start = mix64(np.array([(seed + GOLDEN) & WORD], np.uint64))
    return mix64(mixed_keys ^ start)


def words(numbers: Words, count: int) -> Words:
    """Return the first `count` words of each number's stream, shape (n, count)."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return mix64(numbers[:, None] + steps)


def initial_values(init: Init, numbers: Words, dim: int) -> NDArray[np.float32]:
    """Return the values that rows start from, shape (n, dim); each word of a row's stream gives two of them."""
    if isinstance(init, Constant):
        return np.full((len(numbers), dim), init.value, np.float32)
    stream = words(numbers, (dim + 1) // 2)
    make = _normal if isinstance(init, Normal) else _uniform
    scale = init.std if isinstance(init, Normal) else init.scale
    return make(stream, np.float32(scale))[:, :dim]


def admitted(spec: TableSpec, numbers: Words) -> NDArray[np.bool_]:
    """Return which ids without a row would read as their initial values; the others read as zeros. Shape (n,)."""
    if isinstance(spec.entry, CountFilter):
        return np.zeros(len(numbers), np.bool_)
    if isinstance(spec.entry, Probability):
        share = (mix64(numbers ^ np.uint64(ADMISSION)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.asarray(share < spec.entry.p)
    return np.ones(len(numbers), np.bool_)


def nearest_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    carry = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return _truncate(values, bits, carry)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the values rounded to bfloat16, ties to even, as its bits; every NaN is the same."""
    bits = (nearest_bfloat16(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), bits)


def from_bfloat16_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the values of such bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def stochastic_bfloat16(values: NDArray[np.float32], numbers: Words, tick: int) -> NDArray[np.float32]:
    """Return the values rounded to one of their two neighbours in bfloat16, the nearer the likelier.

    The draw depends on the row, the tick and the column alone, so a log that is applied again gives the same bits.

    Args:
        values: Shape (n, dim).
        numbers: Of the rows, shape (n,).
        tick: Of the change.
    """
    dim = values.shape[1]
    streams = mix64((numbers ^ np.uint64(ROUNDING)) + np.uint64(tick * GOLDEN & WORD))
    quarters = words(streams, -(-dim // 4)).astype("<u8", copy=False).view("<u2")
    return _truncate(values, np.ascontiguousarray(values).view(np.uint32), quarters[:, :dim].astype(np.uint32))


def _truncate(values: NDArray[np.float32], bits: NDArray[np.uint32], carry: NDArray[np.uint32]) -> NDArray[np.float32]:
    finite = (bits & np.uint32(0x7F800000)) != 0x7F800000
    # An infinity is cut as it is; a NaN keeps a bit that says so.
    special = np.where(np.isnan(values), bits | np.uint32(0x00400000), bits)
    return (np.where(finite, bits + carry, special) & np.uint32(0xFFFF0000)).view(np.float32)


def _uniform(stream: Words, scale: np.float32) -> NDArray[np.float32]:
    """24 bits a value; all but the product with the scale is exact."""
    shifts = np.array([40, 8], np.uint64)
    numerators = ((stream[..., None] >> shifts) & np.uint64(0xFFFFFF)).astype(np.float32)
    return ((numerators * np.float32(2.0**-23) - np.float32(1)) * scale).reshape(len(stream), 2 * stream.shape[1])


def _normal(stream: Words, scale: np.float32) -> NDArray[np.float32]:
    """G. E. P. Box, M. E. Muller, "A note on the generation of random normal deviates", 1958."""
    radius = np.sqrt(-2 * np.log(((stream >> np.uint64(32)).astype(np.float64) + 1) * 2.0**-32))
    angle = (stream & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2.0**-32 * 2 * np.pi)
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return (pairs * np.float64(scale)).astype(np.float32).reshape(len(stream), 2 * stream.shape[1])
