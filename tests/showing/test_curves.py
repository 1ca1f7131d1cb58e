"""The axes of pictures: labels differ, are true, and are where they say, whatever the range."""

import decimal
import math
import re

import numpy as np
import pytest

from jstep.showing.drawing import Curve, picture

UNITS = {"k": 3, "M": 6, "G": 9}


def number(label):
    return (
        decimal.Decimal(label)
        if label[-1].isdigit()
        else decimal.Decimal(label[:-1]).scaleb(UNITS[label[-1]])
    )


def share(value, low, high):
    """The place of a value between two others, whose difference may overflow or be subnormal."""
    down = 2.0**-600 if abs(value) > 1 or abs(low) > 1 or abs(high) > 1 else 2.0**600
    return (value * down - low * down) / (high * down - low * down)


def check(values, steps):
    """Check a picture of one curve; return the labels of its two axes."""
    svg = picture(
        "loss", [Curve("loss", np.array(steps, np.int64), np.array(values, float))], style=False
    )
    heights = [float(y) - 4 for y in re.findall(r'x="-6" y="([-\d.]+)"', svg)]
    # The last one is the name of the other axis.
    y_labels = re.findall(r'text-anchor="end">([^<]*)<', svg)[:-1]
    x_labels = re.findall(r'text-anchor="middle">([^<]*)<', svg)
    for labels in (y_labels, x_labels):
        numbers = [number(label) for label in labels]
        assert numbers == sorted(set(numbers)), labels
    assert x_labels
    assert len(y_labels) >= 2
    assert all(min(steps) <= number(label) <= max(steps) for label in x_labels)
    (low, high), is_log = (
        map(float, re.search(r'data-y="(\S+) (\S+)"', svg).groups()),
        'data-log="1"' in svg,
    )
    assert math.isfinite(low)
    assert math.isfinite(high)
    for label, height in zip(y_labels, heights, strict=True):
        value = math.log10(number(label)) if is_log else float(number(label))
        assert height == pytest.approx(168 * (1 - share(value, low, high)), abs=0.2), label
    assert f'data-x="{min(steps)} {max(steps)}"' in svg
    assert f"steps {min(steps)} to {max(steps)}" in svg
    path = re.search(r'class="line[^>]* d="([^"]*)"', svg)[1]
    points = [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+),([-\d.]+)", path)]
    assert all(-0.1 <= x <= 560.1 and -0.1 <= y <= 168.1 for x, y in points), path
    assert "nan" not in path
    return y_labels, x_labels


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([10, 10.0005, 10.001], ["10", "10.0005", "10.001"]),
        ([1e-14, 5e-14], ["1e-14", "2e-14", "3e-14", "4e-14", "5e-14"]),
        ([0, 1e-300, 0], ["0", "5e-301", "1e-300"]),
        ([1e-300, 1e300], ["1e-300", "1e-180", "1e-60", "1e+60", "1e+180", "1e+300"]),
        ([-1.7e308, 1.7e308], ["-1e+308", "0", "1e+308"]),
        ([1.7e308, 1.7e308], ["5e+307", "1e+308", "1.5e+308"]),
        ([-7e-3], ["-0.012", "-0.01", "-0.008", "-0.006", "-0.004", "-0.002"]),
        ([3, math.nan, math.inf, 5], ["3", "3.5", "4", "4.5", "5"]),
        ([15_000, 20_000], ["14k", "16k", "18k", "20k"]),
        ([10, math.nextafter(10, 11)], ["5", "10", "15", "20"]),
    ],
    ids=str,
)
def test_labels_of_values(values, labels):
    assert check(values, range(1, len(values) + 1))[0] == labels


@pytest.mark.parametrize(
    ("steps", "labels"),
    [
        ([12_345_678, 12_345_741], ["12345680", "12345700", "12345720", "12345740"]),
        ([10_000, 50_000], ["10k", "20k", "30k", "40k", "50k"]),
        ([7], ["7"]),
        ([2**53 + 1, 2**53 + 2, 2**53 + 3], [f"{2**53 + i}" for i in (1, 2, 3)]),
    ],
    ids=str,
)
def test_labels_of_steps(steps, labels):
    assert check(np.arange(float(len(steps))), steps)[1] == labels
