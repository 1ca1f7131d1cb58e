"""Text, HTML and figures for people: numbers, sizes, lists, tables."""

import base64
import html
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH = 100
"""The longest line of printed tables."""
SHOWN = 20
"""Entries of a list in a message."""


def size(number: float, digits: int = 3) -> str:
    """Format a number of bytes."""
    return scaled(number, "B", 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi"), digits)


def scaled(
    count: float,
    unit: str,
    base: int = 1000,
    prefixes: Sequence[str] = ("", "k", "M", "G", "T", "P"),
    digits: int = 3,
) -> str:
    """Format a number with a prefix of its unit: 1.5 GFLOP."""
    power = 0
    while abs(count) >= base and power + 1 < len(prefixes):
        count, power = count / base, power + 1
    text = f"{count:.0f}" if power == 0 or abs(count) >= 10 ** (digits - 1) else f"{count:.{digits}g}"
    return f"{text} {prefixes[power]}{unit}"


def count(number: Any) -> str:
    """Format an integer, with spaces between thousands."""
    return f"{int(number):,}".replace(",", " ")


def array_type(shape: Iterable[int], dtype: Any) -> str:
    """Format the shape and dtype of an array: `float32[2,3]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def cut(text: str, longest: int) -> str:
    """Cut off the end of a long text."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def cut_path(path: str, longest: int = 36) -> str:
    """Cut off the beginning of a long path: its end tells leaves apart."""
    return path if len(path) <= longest else "…" + path[1 - longest :]


def listed(words: Sequence[str]) -> str:
    """Return the first word, and the number of the others."""
    return words[0] if len(words) == 1 else f"{words[0]} and {len(words) - 1} more"


def listing(title: str, items: Sequence[str], most: int = SHOWN) -> str:
    """Format a part of a message: title, number of items, first items; the empty string if there are no items."""
    if not items:
        return ""
    more = f", … and {len(items) - most} more" if len(items) > most else ""
    return f"; {title} ({len(items)}): " + ", ".join(items[:most]) + more


def wrapped(title: str, words: Sequence[str]) -> list[str]:
    """Wrap a list of words after a title."""
    lines = [f"{title}  "]
    for i, word in enumerate(words):
        more = word + ("" if i + 1 == len(words) else ", ")
        if len(lines[-1]) + len(more.rstrip()) > WIDTH:
            lines.append(" " * (len(title) + 2))
        lines[-1] += more
    return [line.rstrip() for line in lines]


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Align the cells of rows of equal length.

    Args:
        rows: The rows, the heads first.
        left: The number of columns that are left-aligned; the others are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return "  ".join(cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in pairs).rstrip()

    return list(map(line, rows))


_CELL = "padding: 0.15em 0.9em 0.15em 0; border: none; background: none; color: inherit"
_RIGHT = f"{_CELL}; text-align: right; font-variant-numeric: tabular-nums"
_LEFT = f"{_CELL}; text-align: left"
_RULE = "border-bottom: 1px solid color-mix(in srgb, currentColor 35%, transparent)"


def html_table(title: str, rows: Iterable[Sequence[str]], head: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Format an HTML table for a notebook, in the colors of its theme; all strings are escaped.

    Args:
        title: The title above the table.
        rows: The rows: the first cell is left-aligned, the others right-aligned.
        head: The names of the columns, if any.
        notes: Lines below the table.
    """
    parts = [f'<div style="margin: 0.4em 0"><div style="font-weight: 600">{html.escape(title)}</div>']
    parts.append('<table style="border-collapse: collapse; background: none; color: inherit; font-size: 0.92em">')
    if head:
        cells = "".join(f'<th style="{_side(i)}; {_RULE}">{html.escape(name)}</th>' for i, name in enumerate(head))
        parts.append(f"<tr>{cells}</tr>")
    for row in rows:
        cells = "".join(f'<td style="{_side(i)}">{html.escape(cell)}</td>' for i, cell in enumerate(row))
        parts.append(f'<tr style="background: none">{cells}</tr>')
    parts.append("</table>")
    parts += [f'<div style="font-size: 0.92em; margin-top: 0.3em">{html.escape(note)}</div>' for note in notes]
    return "".join([*parts, "</div>"])


def html_picture(png: bytes | None, alt: str) -> str:
    """Format an inline image; an empty string without an image."""
    if png is None:
        return ""
    source = base64.b64encode(png).decode()
    # White background also in dark themes, because plots are drawn in black.
    style = "max-width: 44em; width: 100%; background: white; border-radius: 4px; padding: 4px"
    return f'<img alt="{html.escape(alt)}" style="{style}" src="data:image/png;base64,{source}">'


def figure() -> Any:
    """Return an empty figure of matplotlib, created without pyplot, which has global state and may need a display.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install jstep[plot]") from error
    return Figure(layout="constrained")


def _side(column: int) -> str:
    return _RIGHT if column else _LEFT
