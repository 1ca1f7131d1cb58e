"""What commands print: text that cannot play tricks on a terminal, and JSON that any reader takes."""

import json
import math
import sys
from typing import Any


def printable(text: Any) -> str:
    """The text with what is no printable character escaped: it may come from anybody's file."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def as_json(value: Any) -> str:
    """One line of strict JSON: numbers that it has not are the strings "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_plain(value), allow_nan=False)


def complain(command: str, what: object) -> None:
    """Tells on stderr what is wrong."""
    print(f"jstep {command}: {printable(what)}", file=sys.stderr)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return printable(value)


def table(heads: Any, rows: list[list[str]], left: int) -> None:
    """Prints columns, the first ones flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in [list(heads), *rows]:
        cells = [
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _plain(x: Any) -> Any:
    if isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    if isinstance(x, dict):
        return {str(key): _plain(y) for key, y in x.items()}
    return [_plain(y) for y in x] if isinstance(x, list | tuple) else x
