"""Types of HLO instructions, and their sizes in bytes."""

import math
import re
from typing import NamedTuple, TypeAlias


class Array(NamedTuple):
    """The type of an array.

    Attributes:
        dtype: XLA's name of the element type, such as `bf16`.
        dims: The lengths of its dimensions.
        bits: Bits per element; 0 for types without data (`token`, `opaque`).
    """

    dtype: str
    dims: tuple[int, ...]
    bits: int


Shape: TypeAlias = "Array | tuple[Shape, ...]"

_TOKEN = re.compile(r"(?P<open>\()|(?P<close>\))|(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\](?:\{(?P<layout>[^{}]*)\})?")
_PACKED = re.compile(r"E\((\d+)\)")


def parse_shape(text: str) -> Shape:
    """Parse a printed type. Of the layout (tiles, memory spaces), only the packing of elements is used.

    Example:
        >>> from jstep.tools.compiled.shapes import parse_shape, size_of
        >>> size_of(parse_shape("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, u32[])"))
        16
    """
    stack: list[list[Shape]] = [[]]
    for found in _TOKEN.finditer(text):
        if found["open"]:
            stack.append([])
        elif found["close"]:
            if len(stack) > 1:
                inner = tuple(stack.pop())
                stack[-1].append(inner)
        else:
            dims = tuple(int(length) for length in found["dims"].replace("<=", "").split(",") if length)
            stack[-1].append(Array(found["dtype"], dims, _bits(found["dtype"], found["layout"] or "")))
    return stack[0][0] if len(stack[0]) == 1 else tuple(stack[0])


def size_of(shape: Shape) -> int:
    """Return the bytes of an array, or of all arrays of a tuple."""
    if isinstance(shape, Array):
        return -(-math.prod(shape.dims) * shape.bits // 8)
    return sum(size_of(inner) for inner in shape)


def _bits(dtype: str, layout: str) -> int:
    """Return the bits per element; elements below a byte take a byte unless the layout packs them."""
    packed = _PACKED.search(layout)
    if packed:
        return int(packed[1])
    digits = re.search(r"\d+", dtype)
    return 8 if dtype == "pred" else max(8, int(digits[0])) if digits else 0
