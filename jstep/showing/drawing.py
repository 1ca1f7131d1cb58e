"""Curves as SVG, with gaps and marks at nonfinite values."""

import decimal
import functools
import importlib.resources
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jstep.core.tables import html_text

Numbers: TypeAlias = np.ndarray[Any, Any]
_WIDTH = 560
_HEIGHT = 168
COLORS = 10
_DASHES = 4
NEUTRAL = COLORS
"""The color of runs in the background."""


@functools.cache
def stylesheet() -> str:
    file = importlib.resources.files("jstep.showing").joinpath("curves.css")
    return file.read_text(encoding="utf-8")


class Curve(NamedTuple):
    """A curve with gaps at nonfinite values; `key` identifies it in all pictures of a page."""

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


_MARKS = {
    "start": f"M{{}},{_HEIGHT}v-14",
    "checkpoint": f"M{{}},{_HEIGHT}v-6",
    "stage": f"M{{}},{_HEIGHT}V0",
}


def picture(
    title: str,
    curves: Sequence[Curve],
    marks: Sequence[Mark] = (),
    *,
    columns: tuple[int, int] = (_WIDTH, _WIDTH),
    legend: bool = True,
    style: bool = True,
) -> str:
    """Draw curves over the step as a `<figure>`.

    Args:
        title: The caption.
        curves: The curves.
        marks: Marks at steps, and at points; those out of the picture are left out.
        columns: The number of columns of a colored curve, and of a neutral one, in each of which
            its extremes are kept.
        legend: Whether to name the curves.
        style: Whether to include the stylesheet, which a page needs once.
    """
    steps = _step_axis(curves)
    values = _value_axis(curves)
    colored_columns, neutral_columns = columns
    drawn: list[str] = []
    texts: list[str] = []
    ticks = _round_ticks(Decimal(steps.first), Decimal(steps.last), 5)
    ticks = [tick for tick in ticks if steps.first <= tick <= steps.last and tick == int(tick)]
    for tick, text in zip(ticks, _labels(ticks), strict=True):
        x = steps.x(int(tick))
        drawn.append(f'<path class="axis" d="M{x:.1f},{_HEIGHT}v4"/>')
        position = f'x="{x / _WIDTH:.2%}" y="{_HEIGHT + 16}"'
        texts.append(f'<text {position} text-anchor="middle">{html_text(text)}</text>')
    texts.append(f'<text x="100%" y="{_HEIGHT + 32}" text-anchor="end">step</text>')
    keys: list[str] = []
    # What is drawn later covers what is drawn before: neutral curves are in the background.
    for i, curve in sorted(enumerate(curves), key=lambda pair: pair[1].color != NEUTRAL):
        key = i if curve.key is None else curve.key
        if curve.color == NEUTRAL:
            drawn.append(_draw_neutral(curve, key, steps, values, neutral_columns))
            continue
        drawn += _draw_colored(curve, key, steps, values, colored_columns)
        if not curve.pale:
            keys.append(legend_key(curve.name, curve.color, curve.dash, key))
    drawn += _draw_marks(marks, steps, values)
    names = "".join(keys) if legend and len(keys) > 1 else ""
    figure = _frame(title, steps, values, drawn, texts, names)
    return f"<style>{stylesheet()}</style>{figure}" if style else figure


def _draw_neutral(
    curve: Curve, key: int, steps: "_StepAxis", values: "_ValueAxis", columns: int
) -> str:
    kept = thin(curve.steps, curve.values, columns)
    path = _path(steps.x(curve.steps[kept]), values.y(curve.values[kept]), digits=0)
    # One path, isolated points included: there may be many thousands of curves.
    return f'<path class="line pale s{NEUTRAL}" data-i="{key}" d="{path.lines}{path.points}"/>'


def _draw_colored(
    curve: Curve, key: int, steps: "_StepAxis", values: "_ValueAxis", columns: int
) -> list[str]:
    kept = thin(curve.steps, curve.values, columns)
    path = _path(steps.x(curve.steps[kept]), values.y(curve.values[kept]), digits=1)
    kind = f"s{curve.color} pale" if curve.pale else f"s{curve.color}"
    drawn = [f'<path class="line {kind} d{curve.dash % _DASHES}" data-i="{key}" d="{path.lines}"/>']
    if path.points:
        drawn.append(f'<path class="dot {kind}" data-i="{key}" d="{path.points}"/>')
    drawn += [f'<path class="bad" d="M{x},{_HEIGHT}v-6"/>' for x in path.gaps]
    return drawn


def _draw_marks(marks: Iterable[Mark], steps: "_StepAxis", values: "_ValueAxis") -> list[str]:
    # Of marks that would cover each other, the last is drawn: a run may have thousands of
    # checkpoints.
    distinct: dict[tuple[str, int, int], Mark] = {}
    for mark in marks:
        if not steps.first <= mark.step <= steps.last:
            continue
        if mark.value is None or not np.isnan(values.y(mark.value)):
            distinct[mark.kind, round(steps.x(mark.step)), mark.color] = mark
    drawn: list[str] = []
    for mark in distinct.values():
        x = f"{steps.x(mark.step):.1f}"
        if mark.value is None:
            path = _MARKS[mark.kind].format(x)
        else:
            path = f"M{x},{values.y(mark.value):.1f}h0"
        data = "" if mark.key is None else f' data-i="{mark.key}"'
        title = f"<title>{html_text(mark.text)}</title>"
        drawn.append(f'<path class="{mark.kind} s{mark.color}"{data} d="{path}">{title}</path>')
    return drawn


def _frame(
    title: str,
    steps: "_StepAxis",
    values: "_ValueAxis",
    drawn: Iterable[str],
    texts: Iterable[str],
    keys: str,
) -> str:
    label = html_text(f"{title}, steps {steps.first} to {steps.last}")
    lines: list[str] = []
    labels: list[str] = []
    for share, text in values.ticks:
        y = (1 - share) * _HEIGHT
        lines.append(f'<path class="axis" d="M0,{y:.1f}H{_WIDTH}"/>')
        labels.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    size = f'height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none"'
    # From these the script of a page computes the numbers at the pointer.
    ends = f'data-x="{steps.first} {steps.last}" data-y="{values.low!r} {values.high!r}"'
    return (
        f'<figure class="curves"><figcaption>{html_text(title)}</figcaption><div>{keys}</div>'
        f'<svg class="plot" height="{_HEIGHT + 40}" role="img" aria-label="{label}">'
        f"<title>{label}</title>"
        f'<svg width="100%" {size} {ends} data-log="{int(values.is_log)}">'
        f"{''.join([*lines, *drawn])}</svg>"
        f"{''.join([*labels, *texts])}</svg></figure>"
    )


def legend_key(text: str, color: int, dash: int, key: int | None = None) -> str:
    line = (
        f'<svg width="18" height="8"><path class="s{color} d{dash % _DASHES}" d="M0,4h18"/></svg>'
    )
    data = "" if key is None else f' data-i="{key}"'
    return f'<span class="key"{data}>{line} {html_text(text)}</span>'


# Axes.


class _StepAxis(NamedTuple):
    first: int
    last: int

    def x(self, steps: Any) -> Any:
        return (steps - self.first) / ((self.last - self.first) or 1) * _WIDTH


def _step_axis(curves: Sequence[Curve]) -> _StepAxis:
    steps = np.concatenate([np.zeros(0, np.int64), *(curve.steps for curve in curves)])
    if not steps.size:
        return _StepAxis(0, 1)
    return _StepAxis(int(steps.min()), int(steps.max()))


class _ValueAxis(NamedTuple):
    """An axis of values.

    Attributes:
        low: The number at the lower end, or its logarithm.
        high: The same at the upper end.
        ticks: The position of each tick, from 0 to 1, and its label.
        is_log: Whether the axis is logarithmic.
    """

    low: float
    high: float
    ticks: list[tuple[float, str]]
    is_log: bool

    def share(self, values: Any) -> Any:
        """The positions of numbers along the axis, from 0 to 1; NaN for others."""
        with np.errstate(all="ignore"):
            shares = _share(np.log10(values) if self.is_log else values, self.low, self.high)
        return np.where(np.isfinite(shares), shares, np.nan)

    def y(self, values: Any) -> Any:
        return (1 - self.share(values)) * _HEIGHT


def _share(number: Any, low: float, high: float) -> Any:
    """The position of a number between two others, from 0 to 1."""
    # A difference of halves does not overflow.
    return (number / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)


def _value_axis(curves: Sequence[Curve]) -> _ValueAxis:
    """The axis of curves' finite values; logarithmic if positive and spanning three decades."""
    finite = np.concatenate([*(curve.values[np.isfinite(curve.values)] for curve in curves), []])
    if not finite.size:
        return _linear_axis(0.0, 1.0)
    least = float(finite.min())
    most = float(finite.max())
    if least > 0 and least * 1000 <= most:
        return _log_axis(least, most)
    return _linear_axis(least, most)


def _log_axis(least: float, most: float) -> _ValueAxis:
    low = math.floor(math.log10(least))
    high = math.ceil(math.log10(most))
    exponents = range(low, high + 1, max(1, (high - low + 4) // 5))
    labels = _labels([Decimal(1).scaleb(exponent) for exponent in exponents])
    ticks = [
        (_share(float(exponent), low, high), label)
        for exponent, label in zip(exponents, labels, strict=True)
    ]
    return _ValueAxis(float(low), float(high), ticks, is_log=True)


def _linear_axis(least: float, most: float) -> _ValueAxis:
    bottom = Decimal(repr(least))
    top = Decimal(repr(most))
    if top - bottom <= abs(top) * Decimal("1e-13"):
        # One value, but for roundings.
        margin = (abs(bottom) or 1) / Decimal(2)
        bottom -= margin
        top += margin
    numbers = [tick for tick in _round_ticks(bottom, top, 4) if math.isfinite(float(tick))]
    low = min(float(numbers[0]), least)
    high = max(float(numbers[-1]), most)
    labels = _labels(numbers)
    ticks = [
        (_share(float(number), low, high), label)
        for number, label in zip(numbers, labels, strict=True)
    ]
    return _ValueAxis(low, high, ticks, is_log=False)


def _round_ticks(low: Decimal, high: Decimal, most: int) -> list[Decimal]:
    """Return about `most` multiples of 1, 2 or 5 × 10^k, from below `low` to above `high`."""
    with decimal.localcontext(prec=40):
        rough = (high - low or Decimal(1)) / most
        unit = Decimal(1).scaleb(rough.adjusted())
        size = unit * next(
            factor for factor in (1, 2, 5, 10) if factor * unit >= rough * Decimal("0.999")
        )
        return [i * size for i in range(math.floor(low / size), math.ceil(high / size) + 1)]


_SHORT = 4
"""The digits up to which numbers are abbreviated, such as 15k."""


def _labels(ticks: Sequence[Decimal]) -> list[str]:
    with decimal.localcontext(prec=40):
        ticks = [tick.normalize() for tick in ticks]
        # All labels of an axis are abbreviated, or none.
        is_short = all(len(tick.as_tuple().digits) <= _SHORT for tick in ticks)
        return [_label(tick, is_short) for tick in ticks]


def _label(tick: Decimal, is_short: bool) -> str:
    thousands = tick.adjusted() // 3
    if is_short and tick.adjusted() in range(_SHORT, 12):
        return f"{tick.scaleb(-3 * thousands):f}{' kMG'[thousands]}"
    longest = 15 if is_short else 20
    return f"{tick:f}" if -5 < tick.adjusted() < longest else f"{tick:e}"


# Curves with fewer points.


def thin(steps: Numbers, values: Numbers, columns: int) -> Numbers:
    """Return the indices of the points that show in a picture of some columns.

    In each column, these are the first and the last point, a highest and a lowest one, and one that
    is not finite.
    """
    if values.size <= 4 * columns:
        return np.arange(values.size)
    share = (steps - steps[0]) / ((int(steps[-1]) - int(steps[0])) or 1)
    column_of_width = np.floor(share * (columns - 1e-6))
    starts = np.flatnonzero(np.r_[True, np.diff(column_of_width) != 0])
    ends = np.r_[starts[1:], values.size]
    column = np.repeat(np.arange(starts.size), ends - starts)
    is_bad = ~np.isfinite(values)
    highest = np.maximum.reduceat(np.where(is_bad, -np.inf, values), starts)
    lowest = np.minimum.reduceat(np.where(is_bad, np.inf, values), starts)
    kept = [starts, ends - 1]
    for is_kept in (values == highest[column], values == lowest[column], is_bad):
        found = np.flatnonzero(is_kept)
        # The first of each column.
        _, first = np.unique(column[found], return_index=True)
        kept.append(found[first])
    return np.unique(np.concatenate(kept))


class _Path(NamedTuple):
    """A curve in SVG: its lines, its isolated points, and where it has gaps."""

    lines: str
    points: str
    gaps: list[int]


def _path(x: Numbers, y: Numbers, digits: int) -> _Path:
    # The points between two gaps, as ordered sets: after rounding, many are equal.
    pieces: list[dict[str, None]] = [{}]
    gaps: dict[int, None] = {}
    for across, down in zip(x.tolist(), y.tolist(), strict=True):
        if math.isnan(down):
            pieces.append({})
            gaps[round(across)] = None
        else:
            pieces[-1][f"{across:.{digits}f},{down:.{digits}f}"] = None
    lines: list[str] = []
    points: list[str] = []
    for piece in pieces:
        if len(piece) > 1:
            lines.append(f"M{' '.join(piece)}")
        elif piece:
            points.append(f"M{next(iter(piece))}h0")
    return _Path("".join(lines), "".join(points), list(gaps))
