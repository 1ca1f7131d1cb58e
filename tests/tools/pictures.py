"""What an SVG of matplotlib shows: its words, its lines and its marks."""

import re

import numpy as np


def words(svg: str) -> list[str]:
    """Return the texts: matplotlib draws the letters as curves, and writes each text above them as a comment."""
    return re.findall(r"<!-- (.*?) -->", svg, re.DOTALL)


def lines(svg: str, color: str) -> list[np.ndarray]:
    """Return the points of each line of a color, from the left and from the bottom; lines of legends are left out."""
    height = float(re.findall(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[0])
    paths = re.findall(rf'<path d="([^"]+)" clip-path="[^>]*style="fill: none; stroke: {color}', svg)
    pairs = (re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path) for path in paths)
    return [np.array([(float(x), height - float(y)) for x, y in points]) for points in pairs]


def marks(svg: str, color: str) -> int:
    """Return the number of marks of a color."""
    return len(re.findall(rf'<use [^>]*style="fill: {color}|<use [^>]*style="[^"]*stroke: {color}', svg))


def shares(line: np.ndarray) -> np.ndarray:
    """Return the points of a line as shares of its width and of its height."""
    low, high = line.min(axis=0), line.max(axis=0)
    return (line - low) / np.where(high > low, high - low, 1)
