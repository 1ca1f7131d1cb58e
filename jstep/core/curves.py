"""Curves as SVG: round numbers on the axes, gaps and marks at nonfinite values, spikes preserved at any resolution."""

import decimal
import html
import itertools
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Numbers: TypeAlias = np.ndarray[Any, Any]
_WIDTH, _HEIGHT = 560, 168
"""The size of the plot area. It is stretched to the width of the page; its labels are not."""
_DECADES = 3
"""The minimum range of positive values, in decades, for a logarithmic axis."""

STYLE = """
.curves {margin: 0 0 .4em; max-width: 60em; color: inherit; font: 12px system-ui, sans-serif}
.curves figcaption {font-weight: 600; margin-bottom: 2px}
.curves svg {overflow: visible} .curves text {fill: currentColor}
.curves .plot {display: block; width: calc(100% - 80px); margin: 8px 24px 0 56px}
.curves path {vector-effect: non-scaling-stroke}
.curves .axis {stroke: currentColor; stroke-opacity: .25; fill: none} .curves .bad {stroke: #d62728; stroke-width: 1.5}
.curves .line, .key path {fill: none; stroke-width: 1.5; stroke-linejoin: round} .curves .pale {opacity: .35}
.curves .dot {stroke-width: 5; stroke-linecap: round} .curves .best {stroke-width: 9; stroke-linecap: round}
.curves .start {stroke-width: 2} .curves .stage {stroke-width: 1; stroke-dasharray: 2 3}
.curves .d1, .key .d1 {stroke-dasharray: 5 3} .curves .d2, .key .d2 {stroke-dasharray: 1.5 2.5}
.curves .d3, .key .d3 {stroke-dasharray: 9 3 2 3} .key {display: inline-block; margin-right: 1.2em} .off {opacity: .4}
.s0 {stroke: var(--s0, #2a78c2)} .s1 {stroke: var(--s1, #c25e00)} .s2 {stroke: var(--s2, #2e8b3d)}
.s3 {stroke: var(--s3, #a046b4)} .s4 {stroke: var(--s4, #8c6d00)} .s5 {stroke: var(--s5, #00808a)}
.s6 {stroke: var(--s6, #c2326e)} .s7 {stroke: var(--s7, #6b6b6b)}
"""
"""The style of the figures: text and axes inherit the color of the page, so that light and dark themes work."""
_COLORS, _DASHES = 8, 4


class Curve(NamedTuple):
    """A curve with gaps at nonfinite values; dash 0 is solid. A `pale` curve (repeated steps) has no legend entry."""

    name: str
    steps: Numbers
    values: Numbers
    color: int = 0
    dash: int = 0
    pale: bool = False


class Mark(NamedTuple):
    """A mark on the axis, or at a value (kind `"best"`); `text` is its tooltip."""

    kind: str
    step: int
    text: str
    color: int = 0
    value: float | None = None


_MARKS = {"start": f"M{{}},{_HEIGHT}v-14", "checkpoint": f"M{{}},{_HEIGHT}v-6", "stage": f"M{{}},{_HEIGHT}V0"}


def picture(title: str, curves: Sequence[Curve], marks: Sequence[Mark] = (), *, style: bool = True) -> str:
    """Draw curves over the step as a `<figure>`; a page with many figures includes the `style` once."""
    finite = [curve.values[np.isfinite(curve.values)] for curve in curves]
    every = np.concatenate([*finite, []])
    is_log = is_logarithmic(every)
    axis = _axis(every, is_log)
    steps = [curve.steps.astype(np.int64) for curve in curves if curve.steps.size]
    first, last = min((int(at.min()) for at in steps), default=0), max((int(at.max()) for at in steps), default=1)
    x_ticks = [tick for tick in _round_ticks(Decimal(first), Decimal(last), 5) if first <= tick <= last]
    x_ticks = [tick for tick in x_ticks if tick == int(tick)]

    def x(at: Any) -> Any:
        ahead = (at - first).view(np.uint64) if isinstance(at, np.ndarray) else int(at) - first  # exact at any size
        return ahead / float(last - first or 1) * _WIDTH

    def y(at: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            at = np.log10(at) if is_log else np.ldexp(np.asarray(at, float), axis.shift)
        return height(np.where(np.isfinite(at), at, np.nan))

    def height(place: Any) -> Any:
        return _HEIGHT - (place - axis.low) / ((axis.high - axis.low) or 1.0) * _HEIGHT

    drawn, texts, keys = list[str](), list[str](), list[str]()
    for text, place in zip(axis.labels, map(height, axis.places), strict=True):
        drawn.append(f'<path class="axis" d="M0,{place:.1f}H{_WIDTH}"/>')
        texts.append(f'<text x="-6" y="{place + 4:.1f}" text-anchor="end">{text}</text>')
    for tick, text in zip(x_ticks, _labels(x_ticks), strict=True):
        drawn.append(f'<path class="axis" d="M{x(tick):.1f},{_HEIGHT}v4"/>')
        share = f"{x(tick) / _WIDTH:.2%}"
        texts.append(f'<text x="{share}" y="{_HEIGHT + 16}" text-anchor="middle">{text}</text>')
    texts.append(f'<text x="100%" y="{_HEIGHT + 32}" text-anchor="end">step</text>')
    has_legend = sum(not curve.pale for curve in curves) > 1
    for i, curve in enumerate(curves):
        kind = f"s{curve.color % _COLORS}{' pale' * curve.pale}"
        path, dots, bad = _path(x(curve.steps.astype(np.int64)), y(curve.values), max(1.0, len(curves) / 4))
        drawn.append(f'<path class="line {kind} d{curve.dash % _DASHES}" data-i="{i}" d="{path}"/>')
        drawn += [f'<path class="dot {kind}" data-i="{i}" d="{dots}"/>'] * bool(dots)
        drawn += [f'<path class="bad" d="M{at:.1f},{_HEIGHT}v-6"/>' for at in bad]
        if has_legend and not curve.pale:
            keys.append(_key(curve.name, f"s{curve.color % _COLORS} d{curve.dash % _DASHES}", i))
    seen = [each for each in marks if first <= each.step <= last and (each.value is None or np.isfinite(y(each.value)))]
    for mark in {(each.kind, round(x(each.step)), each.color): each for each in seen}.values():
        at = f"{x(mark.step):.1f}"
        d = _MARKS[mark.kind].format(at) if mark.value is None else f"M{at},{y(mark.value):.1f}h0"
        words = f"<title>{html.escape(mark.text)}</title>"
        drawn.append(f'<path class="{mark.kind} s{mark.color % _COLORS}" d="{d}">{words}</path>')
    label = html.escape(f"{title}, steps {first} to {last}", quote=True)
    ends = f'data-x="{first} {last}" data-y="{axis.ends}" data-log="{int(is_log)}"'
    plot = f'<svg width="100%" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" {ends}>'
    return (
        f'{f"<style>{STYLE}</style>" if style else ""}<figure class="curves">'
        f"<figcaption>{html.escape(title)}</figcaption><div>{''.join(keys)}</div>"
        f'<svg class="plot" height="{_HEIGHT + 40}" role="img" aria-label="{label}"><title>{label}</title>'
        f"{plot}{''.join(drawn)}</svg>{''.join(texts)}</svg></figure>"
    )


def _key(text: str, kind: str, i: int) -> str:
    line = f'<svg width="18" height="8"><path class="{kind}" d="M0,4h18"/></svg>'
    return f'<span class="key" data-i="{i}">{line} {html.escape(text)}</span>'


def is_logarithmic(values: Numbers) -> bool:
    # By Python's floats, which overflow silently.
    return bool(values.size and values.min() > 0 and float(values.min()) * 10**_DECADES <= float(values.max()))


class _Axis(NamedTuple):
    """A vertical axis; `places` and limits are exponents of ten, or values times 2**shift, which are at most 1.

    `ends` has the limits themselves, as text.
    """

    labels: list[str]
    places: list[float]
    low: float
    high: float
    ends: str
    shift: int = 0


def _axis(values: Numbers, is_log: bool) -> _Axis:
    if not values.size:
        return _Axis(["0", "1"], [0.0, 1.0], 0.0, 1.0, "0 1")
    least, most = float(values.min()), float(values.max())
    if is_log:
        floor, ceiling = math.floor(math.log10(least)), math.ceil(math.log10(most))
        # Floats end at these powers.
        exponents = range(max(floor, -323), min(ceiling, 308) + 1, max(1, (ceiling - floor + 4) // 5))
        labels = _labels([Decimal(1).scaleb(place) for place in exponents])
        return _Axis(labels, [*map(float, exponents)], floor, ceiling, f"{floor} {ceiling}")
    bottom, top = Decimal(repr(least)), Decimal(repr(most))
    if least == most:
        margin = (abs(bottom) or 1) / Decimal(2)
        bottom, top = bottom - margin, top + margin
    # Beyond the largest float there is no tick, nor between two neighbours.
    ticks = [tick for tick in dict.fromkeys(map(float, _round_ticks(bottom, top, 4))) if math.isfinite(tick)]
    low, high = min(ticks[0], least), max(ticks[-1], most)
    # After this shift, differences neither overflow nor vanish.
    shift = -math.frexp(max(abs(low), abs(high)))[1]
    places = [math.ldexp(tick, shift) for tick in ticks]
    labels = _labels([Decimal(repr(tick)) for tick in ticks])
    return _Axis(labels, places, math.ldexp(low, shift), math.ldexp(high, shift), f"{low!r} {high!r}", shift)


_CONTEXT = decimal.Context(prec=40)
"""Enough digits for the ratio of any float to its distance from the next one."""


def _round_ticks(low: Decimal, high: Decimal, most: int) -> list[Decimal]:
    """Return multiples of 1, 2 or 5 times a power of ten that enclose a range."""
    with decimal.localcontext(_CONTEXT):
        rough = (high - low or Decimal(1)) / most
        unit = Decimal(1).scaleb(rough.adjusted())
        size = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= rough * Decimal("0.999"))
        return [i * size for i in range(math.floor(low / size), math.ceil(high / size) + 1)]


_UNITS = {9: "G", 6: "M", 3: "k"}
_SHORT = 4
"""The maximum number of digits of labels with units."""


def _labels(ticks: Sequence[Decimal]) -> list[str]:
    """Format ticks exactly: `1.5M`, `0.003`, `2e-14`; with all digits and no units if one needs more than four."""
    with decimal.localcontext(_CONTEXT):
        ticks = [tick.normalize() for tick in ticks]
        is_short = all(len(tick.as_tuple().digits) <= _SHORT for tick in ticks)
        return [_label(tick, is_short) for tick in ticks]


def _label(tick: Decimal, is_short: bool) -> str:
    if is_short and tick.adjusted() in range(_SHORT, 12):
        power = next(power for power in _UNITS if power <= tick.adjusted())
        return f"{tick.scaleb(-power):f}{_UNITS[power]}"
    return f"{tick:f}" if -5 < tick.adjusted() < (15 if is_short else 20) else f"{tick:e}"


def label_ticks(values: Iterable[float]) -> list[str]:
    """Format the ticks of a plotting library, which have rounding errors, so that they differ from each other."""
    with decimal.localcontext(_CONTEXT):
        ticks = [Decimal(repr(float(value))) for value in values]
        gaps = [b - a for a, b in itertools.pairwise(sorted(ticks)) if a < b] or [Decimal(1)]
        unit = Decimal(1).scaleb(min(gaps).adjusted() - 3)
        return _labels([(tick / unit).to_integral_value() * unit for tick in ticks])


def label_axis(axis: Any) -> None:
    """Label the ticks of an axis of matplotlib by `label_ticks`, without an offset or a common factor."""
    from matplotlib.ticker import Formatter

    class Labels(Formatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return label_ticks([x])[0]

        def format_ticks(self, values: Iterable[float]) -> list[str]:
            return label_ticks(values)

    axis.set_major_formatter(Labels())


def _path(x: Numbers, y: Numbers, width: float) -> tuple[str, str, list[float]]:
    """Return lines, isolated points and gaps."""
    is_bad = np.isnan(y)
    bad = [float(at) for at in sorted({round(float(at)) for at in x[is_bad]})]
    segment, x, y = np.cumsum(is_bad)[~is_bad], x[~is_bad], y[~is_bad]
    if not x.size:
        return "", "", bad
    # The extremes of each column are kept, so that spikes survive.
    column = np.floor(x / width) if x.size > 2 * _WIDTH / width else np.arange(x.size)
    starts = np.flatnonzero(np.r_[True, (np.diff(column) != 0) | (np.diff(segment) != 0)])
    ends = np.r_[starts[1:], x.size] - 1
    top, bottom = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    lines: list[list[str]] = []
    before = None
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if segment[start] != before:
            lines.append([])
        before = segment[start]
        lines[-1] += dict.fromkeys(f"{x[start]:.1f},{at:.1f}" for at in (y[start], top[i], bottom[i], y[end]))
    path = "".join(f"M{' '.join(points)}" for points in lines if len(points) > 1)
    return path, "".join(f"M{points[0]}h0" for points in lines if len(points) == 1), bad
