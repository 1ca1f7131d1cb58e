"""Curves as SVG, with gaps and marks at nonfinite values."""

import decimal
import functools
import importlib.resources
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jstep.showing.tables import html_text

Numbers: TypeAlias = np.ndarray[Any, Any]
_WIDTH = 560
_HEIGHT = 168
COLORS, _DASHES = 10, 4
NEUTRAL = COLORS
"""The color of runs in the background."""


@functools.cache
def stylesheet() -> str:
    return importlib.resources.files("jstep.showing").joinpath("curves.css").read_text(encoding="utf-8")


class Curve(NamedTuple):
    """A curve with gaps at nonfinite values; `key` identifies what is drawn in all pictures of a page."""

    name: str
    steps: Numbers
    values: Numbers
    color: int = 0
    dash: int = 0
    pale: bool = False
    key: int | None = None


class Mark(NamedTuple):
    """A mark on the axis, or at a value (kind `"best"`); `text` is its tooltip."""

    kind: str
    step: int
    text: str
    color: int = 0
    value: float | None = None
    key: int | None = None


_MARKS = {"start": f"M{{}},{_HEIGHT}v-14", "checkpoint": f"M{{}},{_HEIGHT}v-6", "stage": f"M{{}},{_HEIGHT}V0"}


def picture(
    title: str,
    curves: Sequence[Curve],
    marks: Sequence[Mark] = (),
    *,
    columns: tuple[int, int] = (_WIDTH, _WIDTH),
    legend: bool = True,
    style: bool = True,
) -> str:
    """Draw curves over the step as a `<figure>`; `columns` are the most points of a colored and of a neutral curve."""
    finite = [curve.values[np.isfinite(curve.values)] for curve in curves]
    up = _axis(np.concatenate([*finite, []]))
    steps = np.concatenate([np.zeros(0, np.int64), *(curve.steps for curve in curves)])
    first, last = (int(steps.min()), int(steps.max())) if steps.size else (0, 1)

    def x(step: Any) -> Any:
        return (step - first) / ((last - first) or 1) * _WIDTH

    drawn: list[str] = []
    keys: list[str] = []
    texts: list[str] = []
    ticks = _round_ticks(Decimal(first), Decimal(last), 5)
    ticks = [tick for tick in ticks if first <= tick <= last and tick == int(tick)]
    for tick, text in zip(ticks, _labels(ticks), strict=True):
        drawn.append(f'<path class="axis" d="M{x(int(tick)):.1f},{_HEIGHT}v4"/>')
        texts.append(_below(x(int(tick)), text))
    texts.append(f'<text x="100%" y="{_HEIGHT + 32}" text-anchor="end">step</text>')
    for i, curve in sorted(enumerate(curves), key=lambda pair: pair[1].color != NEUTRAL):
        kind = f"s{curve.color} pale" if curve.pale else f"s{curve.color}"
        key = i if curve.key is None else curve.key
        is_neutral = curve.color == NEUTRAL
        kept = thin(curve.steps, curve.values, columns[is_neutral])
        path, dots, bad = _path(x(curve.steps[kept]), up.y(curve.values[kept]), digits=0 if is_neutral else 1)
        if is_neutral:  # isolated points are part of the path: there may be many thousands of curves
            drawn.append(f'<path class="line pale s{NEUTRAL}" data-i="{key}" d="{path}{dots}"/>')
            continue
        drawn.append(f'<path class="line {kind} d{curve.dash % _DASHES}" data-i="{key}" d="{path}"/>')
        if dots:
            drawn.append(f'<path class="dot {kind}" data-i="{key}" d="{dots}"/>')
        drawn += [f'<path class="bad" d="M{at},{_HEIGHT}v-6"/>' for at in bad]
        if not curve.pale:
            keys.append(legend_key(curve.name, curve.color, curve.dash, key))
    seen = [
        mark for mark in marks if first <= mark.step <= last and (mark.value is None or not np.isnan(up.y(mark.value)))
    ]
    for mark in {(mark.kind, round(x(mark.step)), mark.color): mark for mark in seen}.values():
        at = f"{x(mark.step):.1f}"
        d = _MARKS[mark.kind].format(at) if mark.value is None else f"M{at},{up.y(mark.value):.1f}h0"
        drawn.append(_marked(f"{mark.kind} s{mark.color}", d, mark.text, mark.key))
    ends = f' data-x="{first} {last}" data-y="{up.low!r} {up.high!r}" data-log="{int(up.is_log)}"'
    names = "".join(keys) if legend and len(keys) > 1 else ""
    figure = _framed(title, f"{title}, steps {first} to {last}", up, drawn, texts, names, ends)
    return f"<style>{stylesheet()}</style>{figure}" if style else figure


def _below(x: float, text: str) -> str:
    position = f'x="{x / _WIDTH:.2%}" y="{_HEIGHT + 16}"'
    return f'<text {position} text-anchor="middle">{html_text(text)}</text>'


def _marked(kind: str, d: str, text: str, key: int | None) -> str:
    data = "" if key is None else f' data-i="{key}"'
    return f'<path class="{kind}"{data} d="{d}"><title>{html_text(text)}</title></path>'


def _framed(
    title: str,
    label: str,
    up: "_Axis",
    drawn: Iterable[str],
    texts: Iterable[str],
    keys: str,
    ends: str,
) -> str:
    label = html_text(label)
    lines = [f'<path class="axis" d="M0,{(1 - at) * _HEIGHT:.1f}H{_WIDTH}"/>' for at, _ in up.ticks]
    labels = [f'<text x="-6" y="{(1 - at) * _HEIGHT + 4:.1f}" text-anchor="end">{text}</text>' for at, text in up.ticks]
    size = f'height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none"'
    return (
        f'<figure class="curves"><figcaption>{html_text(title)}</figcaption><div>{keys}</div>'
        f'<svg class="plot" height="{_HEIGHT + 40}" role="img" aria-label="{label}"><title>{label}</title>'
        f'<svg width="100%" {size}{ends}>{"".join([*lines, *drawn])}</svg>'
        f"{''.join([*labels, *texts])}</svg></figure>"
    )


def legend_key(text: str, color: int, dash: int, key: int | None = None) -> str:
    line = f'<svg width="18" height="8"><path class="s{color} d{dash % _DASHES}" d="M0,4h18"/></svg>'
    data = "" if key is None else f' data-i="{key}"'
    return f'<span class="key"{data}>{line} {html_text(text)}</span>'


class _Axis(NamedTuple):
    """An axis, linear or logarithmic; ticks are positions from 0 to 1."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    is_log: bool

    def share(self, values: Any) -> Any:
        """The positions of numbers along the axis, from 0 to 1; NaN for others."""
        with np.errstate(all="ignore"):
            shares = _between(np.log10(values) if self.is_log else values, self.low, self.high)
        return np.where(np.isfinite(shares), shares, np.nan)

    def y(self, values: Any) -> Any:
        return (1 - self.share(values)) * _HEIGHT


def _between(at: Any, low: float, high: float) -> Any:
    return (at / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)  # a difference of halves does not overflow


def _axis(values: Numbers) -> _Axis:
    """The axis of numbers, logarithmic if they are positive and span three decades."""
    least, most = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    if is_log := least > 0 and least * 1000 <= most:
        low, high = float(math.floor(math.log10(least))), float(math.ceil(math.log10(most)))
        exponents = range(int(low), int(high) + 1, max(1, int(high - low + 4) // 5))
        ticks = [Decimal(1).scaleb(power) for power in exponents]
        numbers = [*map(float, exponents)]
    else:
        bottom, top = Decimal(repr(least)), Decimal(repr(most))
        if top - bottom <= abs(top) * Decimal("1e-13"):  # one value, but for roundings
            margin = (abs(bottom) or 1) / Decimal(2)
            bottom, top = bottom - margin, top + margin
        ticks = [tick for tick in _round_ticks(bottom, top, 4) if math.isfinite(float(tick))]
        numbers = [*map(float, ticks)]
        low, high = min(numbers[0], least), max(numbers[-1], most)
    labeled = zip(numbers, _labels(ticks), strict=True)
    return _Axis(low, high, [(_between(number, low, high), text) for number, text in labeled], is_log)


def _round_ticks(low: Decimal, high: Decimal, most: int) -> list[Decimal]:
    with decimal.localcontext(prec=40):
        rough = (high - low or Decimal(1)) / most
        unit = Decimal(1).scaleb(rough.adjusted())
        size = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= rough * Decimal("0.999"))
        return [i * size for i in range(math.floor(low / size), math.ceil(high / size) + 1)]


_SHORT = 4


def _labels(ticks: Sequence[Decimal]) -> list[str]:
    with decimal.localcontext(prec=40):
        ticks = [tick.normalize() for tick in ticks]
        is_short = all(len(tick.as_tuple().digits) <= _SHORT for tick in ticks)
        return [_label(tick, is_short) for tick in ticks]


def _label(tick: Decimal, is_short: bool) -> str:
    thousands = tick.adjusted() // 3
    if is_short and tick.adjusted() in range(_SHORT, 12):
        return f"{tick.scaleb(-3 * thousands):f}{' kMG'[thousands]}"
    return f"{tick:f}" if -5 < tick.adjusted() < (15 if is_short else 20) else f"{tick:e}"


def thin(steps: Numbers, values: Numbers, columns: int) -> Numbers:
    if values.size <= 4 * columns:
        return np.arange(values.size)
    ahead = (steps - steps[0]) / ((int(steps[-1]) - int(steps[0])) or 1)
    starts = np.flatnonzero(np.r_[True, np.diff(np.floor(ahead * (columns - 1e-6))) != 0])
    column = np.repeat(np.arange(starts.size), np.diff(np.r_[starts, values.size]))
    is_bad = ~np.isfinite(values)
    kept = [starts, np.r_[starts[1:], values.size] - 1]
    tops = np.maximum.reduceat(np.where(is_bad, -np.inf, values), starts)
    lows = np.minimum.reduceat(np.where(is_bad, np.inf, values), starts)
    for is_kept in (values == tops[column], values == lows[column], is_bad):
        found = np.flatnonzero(is_kept)
        kept.append(found[np.unique(column[found], return_index=True)[1]])
    return np.unique(np.concatenate(kept))


def _path(x: Numbers, y: Numbers, digits: int) -> tuple[str, str, list[int]]:
    lines, bad = list[dict[str, None]]([{}]), dict[int, None]()
    for at, height in zip(x.tolist(), y.tolist(), strict=True):
        if math.isnan(height):
            lines.append({})
            bad[round(at)] = None
        else:
            lines[-1][f"{at:.{digits}f},{height:.{digits}f}"] = None
    path = "".join(f"M{' '.join(points)}" for points in lines if len(points) > 1)
    return path, "".join(f"M{next(iter(points))}h0" for points in lines if len(points) == 1), list(bad)
