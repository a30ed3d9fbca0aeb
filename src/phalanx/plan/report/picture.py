"""`picture`: draw a Plan as SVG: placement, update and memory of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from rich.cells import cell_len, chop_cells

from phalanx.plan.report.explain import Explanation, RuleRow

_PLACES = (("on servers", "#59a14f"), ("shard", "#4e79a7"), ("cut", "#4e79a7"), ("", "#9aa5b1"))
"""Colours by what the words for a place hold: rows on servers, slices on ranks, copies."""

_STYLE = """<style>
text { fill: #1b2733 } .soft { fill: #57646f } .back { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #e4e9ee } .soft { fill: #9fabb6 } .back { fill: #14191e } }
</style>"""
"""Colours by the scheme of whoever looks at it; without style sheets it is black on white."""

_ROW, _TOP, _BAR, _WIDTH = 24, 84, 260, 1100
_NAME, _PLACE, _UPDATE, _BYTES = 14, 300, 480, 740


def picture(explanation: Explanation) -> str:
    """Return an SVG picture of a Plan that was explained; a bar is a rule's MiB, its dark part what one rank holds."""
    plan, rows = explanation.plan, sorted(explanation.rows, key=lambda row: -row.bytes)
    mesh = " × ".join(f"{axis.name}={axis.size}" for axis in plan.mesh) or "one rank"
    reasons = [f"{reason.setting}: {reason.effect}" for reason in plan.because]
    height = _TOP + _ROW * (len(rows) + len(explanation.stages)) + 18 * len(reasons) + 40
    most = max([row.bytes for row in rows] + [1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        _STYLE,
        f'<rect width="{_WIDTH}" height="{height}" class="back" fill="#fff"/>',
        '<g font-family="sans-serif" font-size="13">',
        f'<text x="{_NAME}" y="24" font-size="16" font-weight="bold">Plan over {escape(mesh)}</text>',
        f'<text x="{_NAME}" y="44" class="soft">{escape(_sums(explanation))}</text>',
        *_heads(),
    ]
    top = float(_TOP)
    for row in rows:
        parts += _draw_row(row, top, most)
        top += _ROW
    for stage in explanation.stages:
        line = f"stage {stage.stage} on rank {stage.holder} of its axis: {', '.join(stage.units)}"
        parts.append(f'<text x="{_NAME}" y="{top + 16:g}">{fit(line, 150)}</text>')
        top += _ROW
    for reason in reasons:
        top += 18
        parts.append(f'<text x="{_NAME}" y="{top:g}" font-size="12" class="soft">{fit(reason, 160)}</text>')
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def _sums(explanation: Explanation) -> str:
    rank_mib = sum(row.rank_bytes for row in explanation.rows) / 2**20
    sent = explanation.reduced_bytes / 2**20
    return (
        f"a rank holds {rank_mib:.4g} MiB of parameters; {explanation.collectives} all-reduces of {sent:.4g} MiB a step"
    )


def _heads() -> Iterator[str]:
    for x, head in (
        (_NAME, "parameters"),
        (_PLACE, "live"),
        (_UPDATE, "updated by"),
        (_BYTES, "MiB (dark: on a rank)"),
    ):
        yield f'<text x="{x}" y="{_TOP - 10}" class="soft" font-size="12">{head}</text>'


def _draw_row(row: RuleRow, top: float, most: int) -> Iterator[str]:
    colour = next(colour for word, colour in _PLACES if word in row.location)
    middle = top + 16
    words = f"{row.match} ({row.tensors})"
    yield f'<text x="{_NAME}" y="{middle:g}" font-weight="bold">{fit(words, 40)}</text>'
    yield f'<text x="{_PLACE}" y="{middle:g}">{fit(row.location, 26)}</text>'
    yield f'<text x="{_UPDATE}" y="{middle:g}">{fit(row.update, 38)}</text>'
    length, on_rank = (_BAR * amount / most for amount in (row.bytes, min(row.rank_bytes, row.bytes)))
    bar = f'<rect x="{_BYTES}" y="{top + 3:g}" height="{_ROW - 7}" fill="{colour}"'
    yield f'{bar} width="{length:.1f}" opacity="0.35"/>'
    yield f'{bar} width="{on_rank:.1f}"/>'
    yield f'<text x="{_BYTES + length + 6:.1f}" y="{middle:g}" class="soft">{row.bytes / 2**20:.3g}</text>'


def fit(text: str, columns: int) -> str:
    """Return the content of a `<text>` no wider than some columns; what is cut has the whole in its `<title>`."""
    if cell_len(text) <= columns:
        return escape(text)
    return f"<title>{escape(text)}</title>{escape(chop_cells(text, columns - 1)[0])}…"
