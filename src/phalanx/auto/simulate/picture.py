"""`draw_step`: draw a simulated step as an SVG timeline: stages down, time to the right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple
from xml.sax.saxutils import escape

from phalanx.auto.simulate.table import format_facts, format_rank, format_title
from phalanx.auto.simulate.values import SimulatedStep, Slice
from phalanx.i18n import Labels, tr
from phalanx.units import format_bytes, format_seconds

_LEGEND: Labels = {
    "forward": "forward",
    "backward": "backward",
    "weights": "gradients of weights",
    "optimizer": "optimizer",
    "collectives": "collectives",
    "send": "send to a stage",
    "gradients": "gradients reduced",
    "idle": "idle",
}
"""What the colours are called."""

COLOURS = {
    "forward": "#4e79a7",
    "backward": "#f28e2b",
    "weights": "#59a14f",
    "optimizer": "#76b7b2",
    "collectives": "#e15759",
    "send": "#9c755f",
    "gradients": "#b07aa1",
    "idle": "#ececec",
}
"""By what a stream does, in the order of the legend."""

_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights", "optimizer": "optimizer"}
_LEFT, _TIME, _RIGHT = 110, 1000, 90
_TOP, _BOTTOM, _ROWS = 84, 44, 640
_LEAST_PIXELS = 0.4
"""A slice thinner than this beside one of its colour is not drawn."""

_PALER = 0.4
"""How much paler the last of several stages of a rank is drawn than the first."""


def draw_step(simulated: SimulatedStep) -> str:
    """Return the SVG picture of a step, in the user's language (PHALANX_LANG).

    A row is one place along the stage axis. Its upper part is what its devices compute, or wait for; its lower part the
    communication beside that.
    """
    simulation = simulated.simulation
    ranks, row = simulation.pipeline.ranks, _row_height(simulation.pipeline.ranks)
    width, height = _LEFT + _TIME + _RIGHT, _TOP + ranks * row + _BOTTOM
    shown = max(item.end for item in simulation.slices)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}">',
        '<g font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height:g}" fill="#fff"/>',
        *_heading(simulated),
        *_axis(shown, _TOP + ranks * row),
    ]
    by_rank: dict[int, list[Slice]] = defaultdict(list)
    for item in sorted(simulation.slices, key=lambda item: item.start):
        by_rank[item.rank].append(item)
    for rank in range(ranks):
        parts += _labels(simulated, rank, _TOP + rank * row, row)
        parts += _row(by_rank[rank], _TOP + rank * row, row, _TIME / shown, simulated.layers)
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def _row_height(ranks: int) -> float:
    return max(9.0, min(40.0, _ROWS / ranks))


def _heading(simulated: SimulatedStep) -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="22" font-size="15" font-weight="bold">{escape(format_title(simulated))}</text>'
    simulation, facts = simulated.simulation, format_facts(simulated)
    if simulation.pipeline.schedule.virtual > 1 and not simulated.layers:
        facts += tr("; later stages of a rank are paler")
    if simulation.left_out:
        facts += tr("; {count} micro-batches of the steady state not drawn", count=simulation.left_out)
    yield f'<text x="{_LEFT}" y="41">{escape(facts)}</text>'
    x = float(_LEFT)
    for name, colour in COLOURS.items():
        title = tr(_LEGEND[name])
        yield f'<rect x="{x:g}" y="54" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 16:g}" y="64">{escape(title)}</text>'
        x += 34 + sum(12 if ord(letter) > 0x2E80 else 6.6 for letter in title)


def _axis(shown: float, bottom: float) -> Iterator[str]:
    step = 10 ** math.floor(math.log10(shown / 5))
    step = next(step * factor for factor in (1, 2, 5, 10) if shown / (step * factor) <= 8)
    for number in range(int(shown / step) + 1):
        x, label = _LEFT + number * step / shown * _TIME, format_seconds(number * step)
        yield f'<path d="M{x:.2f} {_TOP - 4}V{bottom + 5:g}" stroke="#bbb" stroke-width="0.7"/>'
        yield f'<text x="{x:.2f}" y="{bottom + 19:g}" text-anchor="middle" font-size="11">{label}</text>'
    yield f'<text x="{_LEFT + _TIME + 8}" y="{_TOP - 8}" font-size="11">{escape(tr("peak memory"))}</text>'


def _labels(simulated: SimulatedStep, rank: int, top: float, row: float) -> Iterator[str]:
    size, middle = min(12.0, row - 1), top + row / 2 + min(12.0, row - 1) / 3
    label = escape(format_rank(simulated, rank))
    peak = format_bytes(simulated.simulation.peaks[rank])
    yield f'<text x="{_LEFT - 8}" y="{middle:.1f}" text-anchor="end" font-size="{size:g}">{label}</text>'
    yield f'<text x="{_LEFT + _TIME + 8}" y="{middle:.1f}" font-size="{size:g}">{peak}</text>'


class _Layer(NamedTuple):
    """Slices that are drawn as one path, so that a picture of thousands of them stays small."""

    colour: str
    is_beside: bool
    opacity: float


def _row(slices: list[Slice], top: float, row: float, scale: float, names: tuple[str, ...]) -> Iterator[str]:
    """Draw what a rank does."""
    upper, lower = row * 0.66, row * 0.2
    yield f'<rect x="{_LEFT}" y="{top:.1f}" width="{_TIME}" height="{upper:.1f}" fill="{COLOURS["idle"]}"/>'
    drawn: dict[_Layer, list[str]] = defaultdict(list)
    reached: dict[_Layer, float] = defaultdict(float)
    numbers: list[str] = []
    for item, layer in _layers(slices):
        start, end = max(item.start * scale, reached[layer]), item.end * scale
        if end - reached[layer] < _LEAST_PIXELS:
            continue
        reached[layer] = end
        y, high = (top + upper + row * 0.04, lower) if layer.is_beside else (top, upper)
        wide = end - start - (0.5 if end - start > 3 else 0.0)
        drawn[layer].append(f"M{_LEFT + start:.2f} {y:.1f}h{wide:.2f}v{high:.1f}h{-wide:.2f}z")
        number = names[item.stage].rpartition(".")[2] if names else str(item.microbatch)
        if item.stream == "compute" and item.stage >= 0 and upper >= 11 and wide > 7 * len(number) + 3:
            x, base = _LEFT + (start + end) / 2, top + upper / 2 + 4
            numbers.append(
                f'<text x="{x:.1f}" y="{base:.1f}" text-anchor="middle" font-size="11">{escape(number)}</text>'
            )
    for layer, paths in drawn.items():
        yield f'<path fill="{COLOURS[layer.colour]}" fill-opacity="{layer.opacity:g}" d="{"".join(paths)}"/>'
    yield f'<g fill="#fff">{"".join(numbers)}</g>'


def _layers(slices: list[Slice]) -> Iterator[tuple[Slice, _Layer]]:
    """Yield the slices of a rank, and the wait for its last gradients."""
    stages = sorted({item.stage for item in slices if item.stage >= 0})
    began = {item[2:6] for item in slices if item.stream == "compute"}
    computed = 0.0
    for item in slices:
        # Collectives that begin with their pass run beside it; the others hold it up.
        beside = item.stream in ("send", "gradients") or (item.stream == "collectives" and item[2:6] in began)
        if item.kind == "optimizer" and item.start > computed:
            wait = item._replace(stream="gradients", start=computed, end=item.start)
            yield wait, _Layer("gradients", False, 1.0)
        computed = computed if beside else max(computed, item.end)
        turn = stages.index(item.stage) / max(1, len(stages) - 1) if item.stage >= 0 else 0.0
        opacity = 1 - _PALER * turn if item.stream == "compute" else 1.0
        yield item, _Layer(_KINDS[item.kind] if item.stream == "compute" else item.stream, beside, opacity)
