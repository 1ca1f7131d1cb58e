"""Ranges of arrays in reports of tools."""

import numpy as np
import pytest

from jstep.tools.ranges import array_range


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.float16([1, np.nan, np.inf, 3, -np.inf]), "float16[5] from 1 to 3, 1 NaN, 2 infinite"),
        (np.int8([[2, 2]]), "int8[1,2] all 2"),
        (np.float32(0.5), "float32[] 0.5"),
        (np.float32([np.nan]), "float32[1] 1 NaN"),
        (np.zeros((0, 2), np.uint8), "uint8[0,2] empty"),
        (np.complex64([3 + 4j, complex(np.inf, 0)]), "complex64[2] all 5, 1 infinite"),
    ],
)
def test_the_range_of_an_array_as_text(array: np.ndarray, text: str) -> None:
    assert str(array_range(array)) == text
