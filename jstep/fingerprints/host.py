"""Sums of fingerprints over arrays in host memory, in chunks that fit a core's cache."""

from typing import Any

import numpy as np

from jstep.fingerprints.mix import HALF, HIGH, MASK, STRIDE, U, lanes_in_place, split_at

_PIECE = 2**15


def host_sums(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the sums of the two lanes over all elements, uint32 `[2]`."""
    halves = [_sums(words, split_at(array.shape), half) for half, words in enumerate(_words(array))]
    return (sum(halves, np.zeros(2, np.uint64)) & np.uint64(MASK)).astype(U)


def _words(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return the elements as unsigned words, `[n]` or `[n, 2]`; two such arrays for 128-bit elements."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if not flat.dtype.isnative:
        flat = flat.astype(flat.dtype.newbyteorder("="))
    if not flat.size:
        return []
    name = flat.dtype.name
    if name.startswith("float4"):
        return [flat.astype(np.float32).view(U)]
    if name in ("int2", "int4", "uint2", "uint4"):
        return [flat.astype(np.int8 if name.startswith("int") else np.uint8).view(np.uint8)]
    size = flat.dtype.itemsize
    if size <= 4:
        return [flat.view(f"u{size}")]
    words = flat.view("u4").reshape(flat.size, -1)
    return [words[:, at : at + 2] for at in range(0, words.shape[1], 2)]


def _sums(words: np.ndarray[Any, Any], split: int, half: int) -> np.ndarray[Any, Any]:
    total = np.zeros(2, np.uint64)
    base = np.arange(min(_PIECE, len(words)), dtype=U) * U(STRIDE)
    key, first, spare = (np.empty_like(base) for _ in range(3))
    for row in range(0, len(words), split):
        of_row = row // split * HIGH + half * HALF
        for start in range(row, min(row + split, len(words)), _PIECE):
            piece = words[start : min(start + _PIECE, row + split)]
            size = len(piece)
            low, high = (piece, None) if piece.ndim == 1 else (piece[:, 0], piece[:, 1])
            np.add(base[:size], U(((start - row) * STRIDE + of_row) & MASK), out=key[:size])
            a, b = lanes_in_place(low, high, key[:size], first[:size], spare[:size])
            total += np.array([a.sum(dtype=U), b.sum(dtype=U)], np.uint64)
    return total
