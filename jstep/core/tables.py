"""Tables and folded lines, as text and as HTML, and results that are shown as tables."""

import html
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100


def printable(text: object) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def wrap_words(title: str, words: Sequence[str]) -> list[str]:
    return fold(f"{title}  {', '.join(words)}", WIDTH, len(title) + 2)


def columns(rows: Sequence[Sequence[str]], left: int, max_width: int | None = None) -> list[str]:
    """Return the lines of a table; if it is wider than `max_width`, each row as text, with heads.

    Args:
        rows: The heads, and then the rows.
        left: The number of columns that are aligned to the left.
        max_width: The maximum number of characters in a line; None for any.
    """
    rows = [[printable(cell) for cell in cells] for cells in rows]
    if max_width is not None and breadth(rows) > max_width:
        return _named_cells(rows, max_width)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for cells in rows:
        padded: list[str] = []
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            padded.append(cell.ljust(width) if i < left else cell.rjust(width))
        lines.append("  ".join(padded).rstrip())
    return lines


def _named_cells(rows: Sequence[Sequence[str]], max_width: int) -> list[str]:
    # The first cell names its row, and needs no head.
    heads = ["", *rows[0][1:]]
    lines: list[str] = []
    for cells in rows[1:]:
        named = [f"{head} {cell}".strip() for head, cell in zip(heads, cells, strict=True)]
        lines += fold("  ".join(named).strip(), max_width, 2)
    return lines


def breadth(rows: Sequence[Sequence[str]]) -> int:
    """Return the number of characters in a line of a table."""
    return sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) - 2


def fold(line: str, max_width: int, indent: int = 0) -> list[str]:
    if len(line) <= max_width:
        return [line]
    return textwrap.wrap(
        line, max(max_width, indent + 1), subsequent_indent=" " * indent, break_on_hyphens=False
    )


# Tables as HTML.

_CELL = "padding: 0.15em 0.9em 0.15em 0; border: none; background: none; color: inherit"
_RIGHT = f"{_CELL}; text-align: right; font-variant-numeric: tabular-nums"
_LEFT = f"{_CELL}; text-align: left; white-space: pre-wrap"  # blanks are the branches of a tree
_RULE = "border-bottom: 1px solid color-mix(in srgb, currentColor 35%, transparent)"


def html_text(text: object) -> str:
    """Escape untrusted text for a page, as `printable` does for a terminal."""
    return html.escape(printable(text))


def html_table(
    title: str, rows: Iterable[Sequence[str]], head: Sequence[str] = (), notes: Sequence[str] = ()
) -> str:
    parts = [f'<div style="margin: 0.4em 0"><div style="font-weight: 600">{html_text(title)}</div>']
    parts.append(
        '<table style="border-collapse: collapse; background: none; color: inherit; '
        'font-size: 0.92em">'
    )
    if head:
        cells = "".join(
            f'<th style="{_RIGHT if i else _LEFT}; {_RULE}">{html_text(name)}</th>'
            for i, name in enumerate(head)
        )
        parts.append(f"<tr>{cells}</tr>")
    for row in rows:
        parts.append('<tr style="background: none">')
        for i, cell in enumerate(row):
            # Not `strip()` for the first cell: the table of runs indents branches.
            text = cell.strip() if i else cell.rstrip()
            parts.append(f'<td style="{_RIGHT if i else _LEFT}">{html_text(text)}</td>')
        parts.append("</tr>")
    parts.append("</table>")
    parts += [
        f'<div style="font-size: 0.92em; margin-top: 0.3em">{html_text(note)}</div>'
        for note in notes
    ]
    return "".join([*parts, "</div>"])


class Tabular:
    """A result that is shown as a table."""

    _left = 1
    """The number of left-aligned columns in text."""

    def _title(self) -> str:
        raise NotImplementedError

    def _rows(self) -> Sequence[Sequence[str]]:
        raise NotImplementedError

    def _head(self) -> Sequence[str]:
        return ()

    def _notes(self) -> Sequence[str]:
        return ()

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [self._title(), *(f"  {line}" for line in columns(self._rows(), self._left))]
        for note in self._notes():
            lines += textwrap.wrap(
                note, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_table(self._title(), self._rows(), self._head(), self._notes())
