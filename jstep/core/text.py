"""Text for people: numbers of bytes and operations, and columns."""

from collections.abc import Sequence


def size(count: float, digits: int = 3) -> str:
    """Format a number of bytes."""
    return scaled(count, "B", 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi"), digits)


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
