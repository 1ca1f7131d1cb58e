"""Curves as SVG: axes with round numbers, gaps and marks where values are not finite, spikes that are never lost."""

import html
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Numbers: TypeAlias = np.ndarray[Any, Any]
WIDTH, HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 24, 40, 32
_DECADES = 3
"""From so many decades on, the axis of positive values is logarithmic."""

STYLE = """
.curves {max-width: 640px; width: 100%; height: auto; font: 12px system-ui, sans-serif; color: inherit}
.curves text {fill: currentColor} .curves .axis {stroke: currentColor; stroke-opacity: .25; fill: none}
.curves .line {fill: none; stroke-width: 1.5; stroke-linejoin: round} .curves .pale {opacity: .3}
.curves .dashed {stroke-dasharray: 5 3} .curves .bad {stroke: #d62728; stroke-width: 1.5}
.curves .s0 {stroke: #2a78c2} .curves .s1 {stroke: #c25e00} .curves .s2 {stroke: #2e8b3d} .curves .s3 {stroke: #a046b4}
.curves .s4 {stroke: #8c6d00} .curves .s5 {stroke: #00808a} .curves .s6 {stroke: #c2326e} .curves .s7 {stroke: #6b6b6b}
"""
"""The style of the pictures: text and axes have the color of the page's text, so that light and dark pages work."""
COLORS = 8


class Curve(NamedTuple):
    """A curve.

    Attributes:
        name: Its name in the legend.
        steps: Its steps, in order.
        values: Their values; those that are not finite are gaps, with a mark below them.
        color: The number of its color.
        dashed: Whether it is dashed, such as an evaluation beside the training.
        pale: Whether it is pale, such as steps that were made again; it is not in the legend.
    """

    name: str
    steps: Numbers
    values: Numbers
    color: int = 0
    dashed: bool = False
    pale: bool = False


def picture(title: str, curves: Sequence[Curve], *, style: bool = True) -> str:
    """Draw curves over the step, as one `<svg>` element.

    Args:
        title: What is drawn.
        curves: The curves.
        style: Whether to put the style into the picture; a page with many of them has it once.
    """
    finite = [curve.values[np.isfinite(curve.values)] for curve in curves]
    every, steps = np.concatenate([*finite, []]), np.concatenate([*(curve.steps for curve in curves), []])
    is_log = is_logarithmic(every)
    ticks, places, low, high = _axis(every, is_log)
    first, last = (float(steps.min()), float(steps.max())) if steps.size else (0.0, 1.0)
    x_ticks = [tick for tick in _round_ticks(first, last, 6) if first <= tick <= last and tick == int(tick)]

    def x(at: Numbers) -> Numbers:
        return _LEFT + (at - first) / ((last - first) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(at: Numbers) -> Numbers:
        return HEIGHT - _BOTTOM - (at - low) / ((high - low) or 1.0) * (HEIGHT - _TOP - _BOTTOM)

    floor = HEIGHT - _BOTTOM
    parts = [f'<text x="0" y="12" font-weight="600">{html.escape(title)}</text>']
    for text, place in zip(ticks, y(np.array(places)), strict=True):
        parts.append(f'<path class="axis" d="M{_LEFT},{place:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{text}</text>')
    for tick, place in zip(x_ticks, x(np.array(x_ticks, float)), strict=True):
        parts.append(f'<path class="axis" d="M{place:.1f},{floor}v4"/>')
        parts.append(f'<text x="{place:.1f}" y="{floor + 16}" text-anchor="middle">{short(tick)}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 2}" text-anchor="end">step</text>')
    after = 0.0
    for curve in curves:
        kind = f"line s{curve.color % COLORS}{' dashed' * curve.dashed}{' pale' * curve.pale}"
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.log10(curve.values) if is_log else curve.values
        path, bad = _path(x(curve.steps.astype(float)), y(np.where(np.isfinite(values), values, np.nan)))
        parts.append(f'<path class="{kind}" d="{path}"/>')
        parts += [f'<path class="bad" d="M{at:.1f},{floor - 6}v6"/>' for at in bad]
        if not curve.pale and len(curves) > 1 and after < WIDTH - 60:
            name = curve.name if len(curve.name) < 40 else f"{curve.name[:39]}…"
            parts.append(f'<path class="{kind}" d="M{_LEFT + after:.0f},26h16"/>')
            parts.append(f'<text x="{_LEFT + after + 20:.0f}" y="30">{html.escape(name)}</text>')
            after += 36 + 7 * len(name)
    label = html.escape(f"{title}, steps {short(first)} to {short(last)}", quote=True)
    head = f'<svg class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return f"{head}<title>{label}</title>{f'<style>{STYLE}</style>' if style else ''}{''.join(parts)}</svg>"


def is_logarithmic(values: Numbers) -> bool:
    """Whether finite values are positive and span decades, so that their axis is logarithmic."""
    return bool(values.size and values.min() > 0 and values.max() / values.min() >= 10**_DECADES)


def short(number: float) -> str:
    """Format a number for an axis: `1.5k`, `20M`, `0.003`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size and not (abs(number) < 1e4 and number == int(number)):
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"


def _axis(values: Numbers, is_log: bool) -> tuple[list[str], list[float], float, float]:
    """The texts and the places of the ticks of values, and the ends of their axis."""
    if not values.size:
        return ["0", "1"], [0.0, 1.0], 0.0, 1.0
    if is_log:
        low, high = math.floor(math.log10(values.min())), math.ceil(math.log10(values.max()))
        places = list(range(low, high + 1, max(1, (high - low + 4) // 5)))
        return [f"{10.0**place:.4g}" for place in places], [float(place) for place in places], low, high
    least, most = float(values.min()), float(values.max())
    if least == most:
        least, most = least - (abs(least) or 1) * 0.5, most + (abs(most) or 1) * 0.5
    found = _round_ticks(least, most, 4)
    return [short(tick) for tick in found], found, found[0], found[-1]


def _round_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from below one number to above another."""
    rough = (high - low or 1.0) / most
    unit = 10 ** math.floor(math.log10(rough))
    size = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)
    return [round(i * size, 12) for i in range(math.floor(low / size), math.ceil(high / size) + 1)]


def _path(x: Numbers, y: Numbers) -> tuple[str, list[float]]:
    """A path through points, with the least and the greatest of each column of pixels, and where there are gaps."""
    is_bad = np.isnan(y)
    bad = sorted({round(float(at)) for at in x[is_bad]})
    segment, x, y = np.cumsum(is_bad)[~is_bad], x[~is_bad], y[~is_bad]
    if not x.size:
        return "", [float(at) for at in bad]
    column = np.floor(x) if x.size > 2 * WIDTH else np.arange(x.size)
    starts = np.flatnonzero(np.r_[True, (np.diff(column) != 0) | (np.diff(segment) != 0)])
    ends = np.r_[starts[1:], x.size] - 1
    top, bottom = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    words, before = [], None
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        points = dict.fromkeys([f"{x[start]:.1f},{at:.1f}" for at in (y[start], top[i], bottom[i], y[end])])
        is_new = segment[start] != before
        before = segment[start]
        for point in points:
            words.append(f"{'M' if is_new else 'L'}{point}")
            is_new = False
        if len(points) == 1 and (i + 1 == len(starts) or segment[starts[i + 1]] != before) and words[-1][0] == "M":
            words.append("m-2,0h4")  # a point alone is seen
    return "".join(words), [float(at) for at in bad]
