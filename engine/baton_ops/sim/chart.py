"""Distributions as a self-contained SVG: share of requests over seconds, on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH = 760
HEIGHT = 440
LEFT = 60
RIGHT = 160
TOP = 40
BOTTOM = 50
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
    "#999933",
    "#882255",
    "#44aa99",
)
"""Distinguishable with color-blind eyes too (Okabe and Ito; Tol)."""
POINTS = 400
"""Per curve at most: enough for the eye, little for the file."""
LEAST = 1e-3
"""The axis never begins before this [s]."""


def cdf_svg(title: str, x_label: str, curves: Mapping[str, Sequence[float]]) -> str:
    """An SVG document; `curves` maps a name to values in seconds (empty ones are left out)."""
    drawn = {name: sorted(values) for name, values in curves.items() if values}
    # The fastest percent may be drawn at the left edge: a few full cache hits would stretch the
    # axis by decades.
    low = math.floor(
        math.log10(max(min((v[len(v) // 100] for v in drawn.values()), default=LEAST), LEAST))
    )
    high = max(math.ceil(math.log10(max([LEAST, *(v[-1] for v in drawn.values())]))), low + 1)
    inner_w = WIDTH - LEFT - RIGHT
    inner_h = HEIGHT - TOP - BOTTOM

    def x_of(value: float) -> float:
        return LEFT + inner_w * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    def y_of(share: float) -> float:
        return TOP + inner_h * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{LEFT + inner_w / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
    ]
    for exponent in range(low, high + 1):
        position = x_of(10.0**exponent)
        parts.append(
            f'<line x1="{position:.1f}" x2="{position:.1f}" y1="{y_of(1)}" y2="{y_of(0)}" stroke="#ddd"/>'
        )
        parts.append(
            f'<text x="{position:.1f}" y="{y_of(0) + 18}" text-anchor="middle">{10.0**exponent:g}</text>'
        )
    for tenths in range(0, 11, 2):
        position = y_of(tenths / 10)
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + inner_w}" y1="{position:.1f}" y2="{position:.1f}" stroke="#ddd"/>'
        )
        parts.append(
            f'<text x="{LEFT - 8}" y="{position + 4:.1f}" text-anchor="end">{tenths / 10:g}</text>'
        )
    for i, (name, values) in enumerate(drawn.items()):
        color = COLORS[i % len(COLORS)]
        points = " ".join(
            f"{x_of(value):.1f},{y_of(share):.1f}" for value, share in _curve_steps(values)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>'
        )
        key = TOP + 10 + 18 * i
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 14}" y="{key - 8}" width="14" height="4" fill="{color}"/>'
        )
        parts.append(f'<text x="{WIDTH - RIGHT + 34}" y="{key}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _curve_steps(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of values up to it) at up to POINTS ranks, first and last among them."""
    n = len(values)
    ranks = (
        sorted({round(i * (n - 1) / (POINTS - 1)) for i in range(POINTS)})
        if n > POINTS
        else range(n)
    )
    return [(values[0], 0.0)] + [(values[rank], (rank + 1) / n) for rank in ranks]
