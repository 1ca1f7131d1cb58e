"""Curves and dots as SVG: round numbers on the axes, gaps and marks at nonfinite values, spikes preserved."""

import decimal
import math
import unicodedata
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jstep.core.checks import truncate
from jstep.core.tables import html_text

Numbers: TypeAlias = np.ndarray[Any, Any]
_WIDTH, _HEIGHT, _LOW = 560, 168, 110
"""The size of the plot area, which is stretched to the width of the page, and the height of a small one."""
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
.curves .best.dot {stroke-width: 13} .curves .pale.s10 {stroke-width: 1; opacity: .25}
.curves .band {stroke: none; fill-opacity: .16}
.curves .start {stroke-width: 2} .curves .stage {stroke-width: 1; stroke-dasharray: 2 3}
.curves .d1, .key .d1 {stroke-dasharray: 5 3} .curves .d2, .key .d2 {stroke-dasharray: 1.5 2.5}
.curves .d3, .key .d3 {stroke-dasharray: 9 3 2 3} .key {display: inline-block; margin-right: 1.2em} .off {opacity: .4}
.s0 {stroke: var(--s0, #2a78c2)} .s1 {stroke: var(--s1, #c25e00)} .s2 {stroke: var(--s2, #2e8b3d)}
.s3 {stroke: var(--s3, #a046b4)} .s4 {stroke: var(--s4, #8c6d00)} .s5 {stroke: var(--s5, #00808a)}
.s6 {stroke: var(--s6, #c2326e)} .s7 {stroke: var(--s7, #6b6b6b)} .s8 {stroke: var(--s8, #3d2fb5)}
.s9 {stroke: var(--s9, #8a2f1b)} .s10 {stroke: var(--s10, #808080)}
.band.s0 {fill: var(--s0, #2a78c2)} .band.s1 {fill: var(--s1, #c25e00)} .band.s2 {fill: var(--s2, #2e8b3d)}
.band.s3 {fill: var(--s3, #a046b4)} .band.s4 {fill: var(--s4, #8c6d00)} .band.s5 {fill: var(--s5, #00808a)}
.band.s6 {fill: var(--s6, #c2326e)} .band.s7 {fill: var(--s7, #6b6b6b)} .band.s8 {fill: var(--s8, #3d2fb5)}
.band.s9 {fill: var(--s9, #8a2f1b)} .band.s10 {fill: var(--s10, #808080); fill-opacity: .08}
"""
"""The style of the figures: text and axes inherit the color of the page, so that light and dark themes work."""
COLORS, _DASHES = 10, 4
NEUTRAL = COLORS
"""The color of runs that stand back: thin, gray and coarse, without a legend entry."""


class Curve(NamedTuple):
    """A curve with gaps at nonfinite values; dash 0 is solid. A `pale` curve (repeated steps) has no legend entry.

    `key` identifies what is drawn in all pictures of a page; None for its index in this one.
    """

    name: str
    steps: Numbers
    values: Numbers
    color: int = 0
    dash: int = 0
    pale: bool = False
    key: int | None = None


class Band(NamedTuple):
    """The range of several curves."""

    text: str
    steps: Numbers
    low: Numbers
    high: Numbers
    color: int
    keys: Sequence[int]


class Dot(NamedTuple):
    """A point of a picture by `dots`, at a number or a category."""

    place: float | str
    value: float
    text: str
    color: int = 0
    key: int = 0
    is_best: bool = False


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
    bands: Sequence[Band] = (),
    columns: tuple[int, int] | None = None,
    legend: bool = True,
    style: bool = True,
) -> str:
    """Draw curves over the step as a `<figure>`; a page with many figures includes the `style` once.

    `columns` is how many columns a colored and a neutral curve may have, by default as many as there is room for.
    """
    finite = [curve.values[np.isfinite(curve.values)] for curve in curves]
    up = _axis(np.concatenate([*finite, []]))
    steps = [curve.steps.astype(np.int64) for curve in curves if curve.steps.size]
    first, last = min((int(at.min()) for at in steps), default=0), max((int(at.max()) for at in steps), default=1)
    x_ticks = [tick for tick in _round_ticks(Decimal(first), Decimal(last), 5) if first <= tick <= last]
    x_ticks = [tick for tick in x_ticks if tick == int(tick)]

    def x(at: Any) -> Any:
        ahead = (at - first).view(np.uint64) if isinstance(at, np.ndarray) else int(at) - first  # exact at any size
        return ahead / float(last - first or 1) * _WIDTH

    drawn, keys = list[str](), list[str]()
    texts = []
    for tick, text in zip(x_ticks, _labels(x_ticks), strict=True):
        drawn.append(_tick(x(tick)))
        texts.append(_below(x(tick), text, _HEIGHT))
    texts.append(f'<text class="unit" x="100%" y="{_HEIGHT + 32}" text-anchor="end">step</text>')
    has_legend = legend and sum(not curve.pale for curve in curves) > 1
    for band in bands:
        around = np.r_[band.steps, band.steps[::-1]].astype(np.int64), np.r_[band.low, band.high[::-1]]
        d = " ".join(f"{a:.0f},{b:.0f}" for a, b in zip(x(around[0]), up.y(around[1]), strict=True) if b == b)
        members, words = " ".join(map(str, band.keys)), html_text(band.text)
        drawn.append(f'<path class="band s{band.color}" data-g="{members}" d="M{d}z"><title>{words}</title></path>')
    most = (_WIDTH / max(1.0, len(curves) / 4),) * 2 if columns is None else columns
    for i, curve in sorted(enumerate(curves), key=lambda each: each[1].color != NEUTRAL):
        kind, key = f"s{curve.color}{' pale' * curve.pale}", i if curve.key is None else curve.key
        is_neutral = curve.color == NEUTRAL
        path, dots, bad = _path(
            x(curve.steps.astype(np.int64)), up.y(curve.values), _WIDTH / most[is_neutral], is_coarse=is_neutral
        )
        if is_neutral:  # isolated points are part of the path: there may be many thousands of curves
            drawn.append(f'<path class="line pale s{NEUTRAL}" data-i="{key}" d="{path}{dots}"/>')
            continue
        drawn.append(f'<path class="line {kind} d{curve.dash % _DASHES}" data-i="{key}" d="{path}"/>')
        drawn += [f'<path class="dot {kind}" data-i="{key}" d="{dots}"/>'] * bool(dots)
        drawn += [f'<path class="bad" d="M{at:.1f},{_HEIGHT}v-6"/>' for at in bad]
        if has_legend and not curve.pale:
            keys.append(legend_key(curve.name, curve.color, curve.dash, key))
    seen = [
        each for each in marks if first <= each.step <= last and (each.value is None or np.isfinite(up.y(each.value)))
    ]
    for mark in {(each.kind, round(x(each.step)), each.color): each for each in seen}.values():
        at = f"{x(mark.step):.1f}"
        d = _MARKS[mark.kind].format(at) if mark.value is None else f"M{at},{up.y(mark.value):.1f}h0"
        kind = f"{mark.kind} s{mark.color}"
        drawn.append(_marked(kind, d, mark.text, mark.key))
    ends = f'data-x="{first} {last}" data-y="{up.ends}" data-log="{int(up.is_log)}"'
    figure = _framed(title, f"{title}, steps {first} to {last}", up, drawn, texts, "".join(keys), ends)
    return f"<style>{STYLE}</style>{figure}" if style else figure


def dots(title: str, points: Sequence[Dot], y_label: str) -> str:
    """Draw points over numbers, on a logarithmic axis if they span two decades, or over categories."""
    up = _axis(np.asarray([point.value for point in points], float))
    drawn, texts = list[str](), list[str]()
    if all(isinstance(point.place, float) for point in points):
        numbers = np.asarray([point.place for point in points], float)
        axis = _axis(numbers, 2)
        xs = list(axis.share(np.log10(numbers) if axis.is_log else np.ldexp(numbers, axis.shift)) * _WIDTH)
        ticks = [axis.share(place) * _WIDTH for place in axis.places]
        longest = max(sum(map(_letter_width, text)) for text in axis.labels) + 4
        every = -(-len(ticks) * longest // (_LABELS_OF_A_LINE * _LABEL_WIDTH))
        texts = [_below(at, text, _LOW + 3) for at, text in list(zip(ticks, axis.labels, strict=True))[:: int(every)]]
    else:
        names = list(dict.fromkeys(str(point.place) for point in points))
        middles = {name: (i + 0.5) / len(names) * _WIDTH for i, name in enumerate(names)}
        xs = [middles[str(point.place)] for point in points]
        labeled = names[:: -(-len(names) // _MAX_LABELS)]
        lines = -(-len(labeled) // _LABELS_OF_A_LINE)
        ticks = [middles[name] for name in labeled]
        texts = [_category(middles[name], name, i % lines) for i, name in enumerate(labeled)]
    drawn += map(_tick, ticks)
    for point, x in sorted(zip(points, xs, strict=True), key=lambda pair: (pair[0].is_best, pair[0].color != NEUTRAL)):
        kind = f"{'best ' * point.is_best}dot s{point.color}"
        drawn.append(_marked(kind, f"M{x:.1f},{up.y(point.value):.1f}h0", point.text, point.key))
    return _framed(title, f"{y_label} against {title}", up, drawn, texts, height=_LOW)


_MAX_LABELS, _LABELS_OF_A_LINE = 8, 4
_MAX_TOOLTIP = 300
_LABEL_WIDTH = 58
"""The width in pixels that the labels of four categories have on a phone."""


def _category(x: float, text: str, line: int) -> str:
    """The label of a category, cut to the room that it has, with all of it as a tooltip."""
    cut = truncate(text, 16)
    while sum(map(_letter_width, cut)) > _LABEL_WIDTH:
        cut = cut[:-2] + "…"
    text = truncate(text, _MAX_TOOLTIP)
    return _below(x, cut, _LOW + 3 + 14 * line, f"<title>{html_text(text)}</title>" if cut != text else "")


def _below(x: float, text: str, height: int, more: str = "") -> str:
    place = f'x="{x / _WIDTH:.2%}" y="{height + 16}"'
    return f'<text class="x" {place} text-anchor="middle">{html_text(text)}{more}</text>'


def _letter_width(letter: str) -> float:
    """The greatest width of a letter at a size of 12 pixels."""
    if not letter.isascii():
        return 13.0 if letter != "…" and unicodedata.category(letter) != "Mn" else 11.0
    return 12.0 if letter in "mwMW@%" else 9.0 if letter.isupper() else 7.0


def _tick(x: float) -> str:
    return f'<path class="axis" d="M{x:.1f},{_HEIGHT}v4"/>'


def _marked(kind: str, d: str, text: str, key: int | None) -> str:
    of = "" if key is None else f' data-i="{key}"'
    return f'<path class="{kind}"{of} d="{d}"><title>{html_text(text)}</title></path>'


def _framed(
    title: str,
    label: str,
    up: "_Axis",
    drawn: Iterable[str],
    texts: Iterable[str],
    keys: str = "",
    ends: str = "",
    height: int = _HEIGHT,
) -> str:
    """The figure around what is drawn, with the vertical axis."""
    lines, labels, label = list[str](), list[str](), html_text(label)
    for text, place in zip(up.labels, (_HEIGHT - up.share(place) * _HEIGHT for place in up.places), strict=True):
        lines.append(f'<path class="axis" d="M0,{place:.1f}H{_WIDTH}"/>')
        labels.append(f'<text x="-6" y="{place / _HEIGHT * height + 4:.1f}" text-anchor="end">{text}</text>')
    plot = (
        f'<svg width="100%" height="{height}" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none"'
        f"{f' {ends}' if ends else ''}>"
    )
    return (
        f'<figure class="curves">'
        f"<figcaption>{html_text(title)}</figcaption><div>{keys}</div>"
        f'<svg class="plot" height="{height + 40}" role="img" aria-label="{label}"><title>{label}</title>'
        f"{plot}{''.join([*lines, *drawn])}</svg>{''.join([*labels, *texts])}</svg></figure>"
    )


def legend_key(text: str, color: int, dash: int, key: int | None = None) -> str:
    line = f'<svg width="18" height="8"><path class="s{color} d{dash % _DASHES}" d="M0,4h18"/></svg>'
    of = "" if key is None else f' data-i="{key}"'
    return f'<span class="key"{of}>{line} {html_text(text)}</span>'


def is_logarithmic(values: Numbers, decades: int = _DECADES) -> bool:
    # By Python's floats, which overflow silently.
    return bool(values.size and values.min() > 0 and float(values.min()) * 10**decades <= float(values.max()))


class _Axis(NamedTuple):
    """An axis; `places` and limits are exponents of ten, or values times 2**shift, which are at most 1.

    `ends` has the limits themselves, as text.
    """

    labels: list[str]
    places: list[float]
    low: float
    high: float
    ends: str
    shift: int = 0
    is_log: bool = False

    def share(self, place: Any) -> Any:
        """How far along the axis a place is, from 0 to 1."""
        return (place - self.low) / ((self.high - self.low) or 1.0)

    def y(self, at: Any) -> Any:
        """The heights of values in a picture whose vertical axis this is."""
        with np.errstate(divide="ignore", invalid="ignore"):
            at = np.log10(at) if self.is_log else np.ldexp(np.asarray(at, float), self.shift)
        return _HEIGHT - self.share(np.where(np.isfinite(at), at, np.nan)) * _HEIGHT


def _axis(values: Numbers, decades: int = _DECADES) -> _Axis:
    """The axis of finite numbers, which is logarithmic if they span so many decades."""
    if not values.size:
        return _Axis(["0", "1"], [0.0, 1.0], 0.0, 1.0, "0 1")
    least, most = float(values.min()), float(values.max())
    if is_logarithmic(values, decades):
        floor, ceiling = math.floor(math.log10(least)), math.ceil(math.log10(most))
        # Floats end at these powers.
        exponents = range(max(floor, -323), min(ceiling, 308) + 1, max(1, (ceiling - floor + 4) // 5))
        labels = _labels([Decimal(1).scaleb(place) for place in exponents])
        return _Axis(labels, [*map(float, exponents)], floor, ceiling, f"{floor} {ceiling}", is_log=True)
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


def thin(steps: Numbers, values: Numbers, columns: int) -> Numbers:
    """Return the indices of the points that show in so many columns: their ends, extremes and first nonfinite one."""
    if values.size <= 4 * columns:
        return np.arange(values.size)
    ahead = (steps - steps[0]).view(np.uint64) / float(int(steps[-1]) - int(steps[0]) or 1)
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


def _path(x: Numbers, y: Numbers, width: float, *, is_coarse: bool = False) -> tuple[str, str, list[float]]:
    """Return lines, isolated points and gaps."""
    is_bad = np.isnan(y)
    bad = [float(at) for at in sorted({round(at) for at in x[is_bad].tolist()})]
    segment, x, y = np.cumsum(is_bad)[~is_bad], x[~is_bad], y[~is_bad]
    if not x.size:
        return "", "", bad
    # The extremes of each column are kept, so that spikes survive.
    column = np.floor(x / width) if x.size > 2 * _WIDTH / width else np.arange(x.size)
    changes = np.flatnonzero((column[1:] != column[:-1]) | (segment[1:] != segment[:-1]))
    starts, ends = np.append(0, changes + 1), np.append(changes, x.size - 1)
    top, bottom = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    columns = zip(
        *(part.tolist() for part in (segment[starts], x[starts], y[starts], top, bottom, y[ends])), strict=True
    )
    lines: list[list[str]] = []
    before = None
    for piece, at, first, high, low, last in columns:
        if piece != before:
            lines.append([])
        before = piece
        if is_coarse:  # whole pixels, and of a column the extremes alone
            heights = (high, low) if first - high < low - first else (low, high)
            points = dict.fromkeys(f"{at:.0f},{height:.0f}" for height in heights)
        else:
            points = dict.fromkeys(f"{at:.1f},{height:.1f}" for height in (first, high, low, last))
        lines[-1] += points
    path = "".join(f"M{' '.join(points)}" for points in lines if len(points) > 1)
    return path, "".join(f"M{points[0]}h0" for points in lines if len(points) == 1), bad
