"""Fingerprints on the host: their arithmetic, and the log of a run's."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jstep.core.checks import shown
from jstep.stores.files import opened

# Arithmetic of fingerprints: 32-bit words are mixed with their position and summed modulo 2^32 in two lanes.
#
# An element is a pair of words (low, high); high is 0 for elements of 32 bits or fewer. At each position a 64-bit
# bijection maps the pair to the two lanes, so that a change of one element always changes the sums, and a change of
# several with probability 1 − 2⁻⁶⁴. Sums do not depend on order, so shards and chunks may be summed separately.

U = np.uint32
STRIDE = 0x9E3779B9
"""2^32 divided by the golden ratio; odd, so that all positions up to 2^32 have different keys."""
SECOND = 0x7F4A7C15
HIGH = 0xC2B2AE3D
HALF = 0x27D4EB2F
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
MASK = 0xFFFFFFFF


def scrambled(x: Any) -> Any:
    """The finalizer of MurmurHash3, a 32-bit bijection with full avalanche."""
    x = (x ^ (x >> U(16))) * U(MULTIPLIERS[0])
    x = (x ^ (x >> U(13))) * U(MULTIPLIERS[1])
    return x ^ (x >> U(16))


def lanes(low: Any, high: Any, key: Any) -> tuple[Any, Any]:
    """Compute the two lanes of elements.

    Args:
        low: The low words, uint32.
        high: The high words, uint32; None if all are 0.
        key: The keys of the positions: `position · STRIDE` modulo 2^32, uint32.
    """
    first = scrambled(low ^ key)
    second = first + (key ^ U(SECOND))
    second = scrambled(second if high is None else second + high)
    return first + second, second


def split_at(shape: tuple[int, ...]) -> int:
    """Return how many elements of the last axes 32 bits can index: all of them, except in huge arrays."""
    size = 1
    for length in reversed(shape):
        if size * length > 2**32:
            break
        size *= length
    return size


def leaf_key(path: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Hash a leaf's path, dtype and shape to four words."""
    text = "\0".join((path, dtype, ",".join(map(str, shape))))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, person=b"jstep").digest()
    return np.frombuffer(digest, "<u4").astype(U)


def sealed(sums: Any, key: Any) -> Any:
    """Compute the fingerprints of leaves from the sums over their elements, by a bijection for each leaf.

    Args:
        sums: The sums of the two lanes, uint32 `[..., 2]`.
        key: The keys from `leaf_key`, uint32 `[..., 4]`.
    """
    a, b = sums[..., 0] ^ key[..., 0], sums[..., 1] ^ key[..., 1]
    a = a + scrambled(b + key[..., 2])
    b = b + scrambled(a + key[..., 3])
    a = a + scrambled(b ^ key[..., 0])
    b = b + scrambled(a ^ key[..., 1])
    return a, b


# Sums of fingerprints over arrays in host memory, in chunks that fit a core's cache.

_PIECE = 2**15


def host_sums(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the sums of the two lanes over all elements, uint32 `[2]`."""
    halves = [_sums(words, split_at(array.shape), half) for half, words in enumerate(_host_words(array))]
    return (sum(halves, np.zeros(2, np.uint64)) & np.uint64(MASK)).astype(U)


def _host_words(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
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
    for row in range(0, len(words), split):
        of_row = row // split * HIGH + half * HALF
        for start in range(row, min(row + split, len(words)), _PIECE):
            piece = words[start : min(start + _PIECE, row + split)]
            low, high = (piece, None) if piece.ndim == 1 else (piece[:, 0], piece[:, 1])
            a, b = lanes(low, high, base[: len(piece)] + U(((start - row) * STRIDE + of_row) & MASK))
            total += np.array([a.sum(dtype=U), b.sum(dtype=U)], np.uint64)
    return total


# Logs of fingerprints, one JSON object per line: `{"step": N, "state": hex, "leaves": {path: hex}}`.

NAME = "fingerprints.jsonl"
_HEX = re.compile("[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry (line) of a log.

    Attributes:
        step: The global step.
        state: The fingerprint of the state as a string.
        leaves: Path → fingerprint of the leaf; None if they were not recorded.
    """

    step: int
    state: str
    leaves: Mapping[str, str] | None = None

    def line(self) -> str:
        """Format the entry as a line of the file."""
        leaves = {} if self.leaves is None else {"leaves": dict(self.leaves)}
        return json.dumps({"step": self.step, "state": self.state, **leaves}, allow_nan=False) + "\n"


@dataclasses.dataclass(frozen=True)
class Log:
    """The contents of a log.

    Attributes:
        entries: Step → its last entry.
        corrupted: A description of the problem for each invalid line.
    """

    entries: Mapping[int, Entry]
    corrupted: tuple[str, ...]


def read(path: str) -> Log:
    """Read a log from a file or an object store; the last line of a step takes precedence.

    Raises:
        OSError: The log cannot be read.
    """
    with opened(path) as file:
        return parsed(file.read())


def parsed(data: bytes) -> Log:
    """Parse the bytes of a log."""
    entries, corrupted = {}, []
    for number, raw in enumerate(data.splitlines(keepends=True), 1):
        entry = _entry(raw)
        if entry is not None:
            entries[entry.step] = entry
        elif raw.strip() and raw.endswith((b"\n", b"\r")):  # the last line may be an interrupted write
            corrupted.append(f"line {number} is not a fingerprint: {shown(raw.decode(errors='replace').strip(), 60)}")
    return Log(entries, tuple(corrupted))


def _entry(raw: bytes) -> Entry | None:
    try:
        found = json.loads(raw)
        step, state, leaves = found["step"], found["state"], found.get("leaves")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    texts = [state, *(leaves.values() if isinstance(leaves, dict) else [])]
    if type(step) is not int or step < 0 or not isinstance(leaves, dict | None):
        return None
    if not all(isinstance(text, str) and _HEX.fullmatch(text) for text in texts):
        return None
    return Entry(step, state, leaves)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference between two fingerprints of one step.

    Attributes:
        step: The step.
        leaves: The paths whose fingerprints differ, or that only one of the two has; None if leaves were not recorded.
        first_only: The paths that only the first has.
        second_only: The paths that only the second has.
    """

    step: int
    leaves: tuple[str, ...] | None
    first_only: tuple[str, ...] = ()
    second_only: tuple[str, ...] = ()

    def text(self) -> str:
        """Describe which leaves differ."""
        if self.leaves is None:
            return "which leaves differ is not known (a log without leaves)"
        names = ", ".join(self.leaves[:8]) + (f" and {len(self.leaves) - 8} more" if len(self.leaves) > 8 else "")
        other = len(self.first_only) + len(self.second_only)
        model = f"; {other} of them in only one of the two: fingerprints of another model" if other else ""
        return f"{len(self.leaves)} {'leaf differs' if len(self.leaves) == 1 else 'leaves differ'}: {names}{model}"


def difference(first: Entry, second: Entry) -> Difference | None:
    """Compare two entries of one step; None if they are equal."""
    if first.state == second.state:
        return None
    if first.leaves is None or second.leaves is None:
        return Difference(first.step, None)
    a, b = first.leaves, second.leaves
    leaves = tuple(path for path in dict.fromkeys([*a, *b]) if a.get(path) != b.get(path))
    return Difference(
        first.step, leaves, tuple(path for path in a if path not in b), tuple(path for path in b if path not in a)
    )


def as_entry(step: int, paths: Any, words: Any, *, per_leaf: bool) -> Entry:
    """Create the entry of a step.

    Args:
        step: The step.
        paths: The paths of the leaves.
        words: The fingerprints of the leaves, uint32 `[n, 2]`, in host memory.
        per_leaf: Whether to record the fingerprints of the leaves.
    """
    pairs = [(int(a), int(b)) for a, b in words]
    a, b = (sum(lane) % 2**32 for lane in zip(*pairs, strict=True)) if pairs else (0, 0)
    leaves = {path: f"{a:08x}{b:08x}" for path, (a, b) in zip(paths, pairs, strict=True)}
    return Entry(step, f"{a:08x}{b:08x}", leaves if per_leaf else None)
