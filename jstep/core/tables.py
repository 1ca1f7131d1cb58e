"""Text in columns and folded lines, as a terminal shows it."""

import textwrap
from collections.abc import Sequence

WIDTH = 100


def printable(text: object) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def wrap_words(title: str, words: Sequence[str]) -> list[str]:
    return fold(f"{title}  {', '.join(words)}", WIDTH, len(title) + 2)


def columns(rows: Sequence[Sequence[str]], left: int, max_width: int | None = None) -> list[str]:
    rows = [[printable(cell) for cell in cells] for cells in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if max_width is None or breadth(rows) <= max_width:
        sides = [str.ljust if i < left else str.rjust for i in range(len(widths))]
        padded = [[put(cell, width) for put, cell, width in zip(sides, cells, widths, strict=True)] for cells in rows]
        return ["  ".join(cells).rstrip() for cells in padded]
    heads = ["", *rows[0][1:]]
    named = ["  ".join(f"{head} {cell}".strip() for head, cell in zip(heads, cells, strict=True)) for cells in rows[1:]]
    return [line for text in named for line in fold(text.strip(), max_width, 2)]


def breadth(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) - 2


def fold(line: str, max_width: int, indent: int = 0) -> list[str]:
    if len(line) <= max_width:
        return [line]
    return textwrap.wrap(line, max(max_width, indent + 1), subsequent_indent=" " * indent, break_on_hyphens=False)
