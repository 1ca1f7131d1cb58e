"""Text and HTML for people: sizes and tables."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Format the lines of a table; the first `left` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return lines
