"""`draw_plan`: draw the planner's result as SVG: layers, their strategies and costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from phalanx.auto.capture.module_calls import ModuleCall
from phalanx.auto.planner.assignment import list_call_costs, list_stages
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.solver.problem import StrategyCost

COLOURS = {
    "whole": "#d9d9d9",
    "column": "#4e79a7",
    "row": "#f28e2b",
    "vocab": "#59a14f",
    "sequence": "#b07aa1",
    "parts": "#edc948",
    "expert": "#76b7b2",
    "cut as it comes": "#a9c4de",
}
"""By how a layer is placed: a copy on every rank, cut by a style, or on what arrives cut."""

_SENT = "#e15759"
_ROW, _TOP, _BAR = 20, 78, 360
_NAME, _KIND, _PLACE, _TIMES = 14, 300, 430, 640


@dataclass(frozen=True, slots=True)
class _Line:
    call: ModuleCall
    style: str
    count: int
    """How many of it the model has, all placed alike."""

    stages: tuple[int, int]
    """The first and the last that has one."""

    option: StrategyCost


def draw_plan(answer: PlanResult) -> str:
    """Return the SVG picture of the fastest Plan: a row for each layer that is not a repetition of another.

    Bars are the seconds of both passes of one micro-batch on one rank, all repetitions together; their red ends are
    collectives of layers.
    """
    lines = list(_lines(answer))
    height, width = _TOP + _ROW * len(lines) + 30, _TIMES + _BAR + 130
    most = max(_seconds(line) for line in lines) or 1.0
    best = answer.search.best
    head = f"{best.config}: {best.step_time_s * 1e3:.4g} ms a step, {best.memory_bytes / 2**20:.4g} MiB a rank"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
        '<g font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_NAME}" y="22" font-size="15" font-weight="bold">{escape(answer.where)}</text>',
        f'<text x="{_NAME}" y="41">{escape(head)}</text>',
        *_legend(),
    ]
    for position, line in enumerate(lines):
        parts += _row(line, _TOP + position * _ROW, most, has_stages=best.config.stages > 1)
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def _lines(answer: PlanResult) -> Iterator[_Line]:
    best, layers = answer.search.best, answer.layers
    options = list_call_costs(best, answer.work)
    stages = list_stages(best, layers)
    for position, call in enumerate(layers.calls):
        if call.template != position:
            continue
        strategy = best.call_strategies[position]
        name = strategy.style or ("cut as it comes" if strategy.has_sharded_input else "whole")
        alike = [i for i, other in enumerate(layers.calls) if other.template == position]
        yield _Line(call, name, len(alike), (stages[alike[0]], stages[alike[-1]]), options[position])


def _seconds(line: _Line) -> float:
    return line.count * (line.option.forward_s + line.option.backward_s)


def _legend() -> Iterator[str]:
    x = float(_NAME)
    for name, colour in {**COLOURS, "collectives": _SENT}.items():
        yield f'<rect x="{x:g}" y="52" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 17:g}" y="62">{name}</text>'
        x += 34 + 7 * len(name)


def _row(line: _Line, top: float, most: float, *, has_stages: bool) -> Iterator[str]:
    call, middle = line.call, top + 14
    name = call.path or ("loss" if call.kind == "loss" else "(model)")
    times = f" x {line.count}" if line.count > 1 else ""
    kind, weight = ("between", "normal") if call.is_glue else (call.kind, "bold")
    yield f'<text x="{_NAME}" y="{middle:g}" font-weight="{weight}">{escape(_short(name) + times)}</text>'
    yield f'<text x="{_KIND}" y="{middle:g}" fill="#777">{escape(kind)}</text>'
    yield f'<rect x="{_PLACE}" y="{top + 2:g}" width="180" height="{_ROW - 4}" fill="{COLOURS[line.style]}"/>'
    label = f"{line.option.label}{_staged(line)}" if has_stages else line.option.label
    dark = line.style in ("column", "row", "vocab", "sequence")
    yield f'<text x="{_PLACE + 6}" y="{middle:g}" fill="{"#fff" if dark else "#222"}">{escape(label)}</text>'
    length = _BAR * _seconds(line) / most
    sent = min(length, _BAR * line.count * line.option.comm_s / most)
    yield f'<rect x="{_TIMES}" y="{top + 4:g}" width="{length - sent:.1f}" height="{_ROW - 8}" fill="#76b7b2"/>'
    red = f'x="{_TIMES + length - sent:.1f}" y="{top + 4:g}" width="{sent:.1f}" height="{_ROW - 8}"'
    yield f'<rect {red} fill="{_SENT}"/>'
    size = line.count * (line.option.persistent_bytes + line.option.activation_bytes)
    figures = f"{_seconds(line) * 1e3:.3g} ms, {size / 2**20:.3g} MiB"
    yield f'<text x="{_TIMES + length + 6:.1f}" y="{middle:g}" fill="#555">{figures}</text>'


def _staged(line: _Line) -> str:
    first, last = line.stages
    return f", stage {first}" if first == last else f", stages {first}-{last}"


def _short(name: str, most: int = 42) -> str:
    return name if len(name) <= most else "..." + name[3 - most :]
