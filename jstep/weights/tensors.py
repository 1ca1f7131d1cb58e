"""Tensors of a safetensors file: its header, which is untrusted input. Read without JAX, for `inspect`."""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jstep.core.checks import format_value
from jstep.stores.files import open_regular

# The header of a safetensors file, which is untrusted input, and its dtypes.
#
# A file is 8 bytes with the size of the header, the header in JSON, and the bytes of the tensors without gaps.

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype("bool"),
    "U8": np.dtype("uint8"),
    "I8": np.dtype("int8"),
    "U16": np.dtype("uint16"),
    "I16": np.dtype("int16"),
    "U32": np.dtype("uint32"),
    "I32": np.dtype("int32"),
    "U64": np.dtype("uint64"),
    "I64": np.dtype("int64"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("float32"),
    "F64": np.dtype("float64"),
    "C64": np.dtype("complex64"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
"""Code → dtype."""
BITS = {code: 8 * dtype.itemsize for code, dtype in _DTYPES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Code → bits per element. The last ones are packed, several elements per byte: JAX cannot hold them."""


def dtype_code(dtype: DTypeLike) -> str | None:
    """Return the safetensors code of a dtype; None for PRNG keys, int4 and complex128."""
    try:
        wanted = np.dtype(dtype).newbyteorder("=")
    except TypeError:
        return None
    return next((code for code, candidate in _DTYPES.items() if candidate == wanted), None)


_Item = TypeVar("_Item")
METADATA = "__metadata__"
LARGEST = 100_000_000
"""Maximum bytes of a header; the `safetensors` package rejects larger ones, too."""
_MAX_AXIS_SIZE = 2**63 - 1


class Tensor(NamedTuple):
    """A tensor in a file, or an array in a checkpoint.

    Attributes:
        name: Its name, or its path in the checkpoint, such as `params/dense/kernel`.
        code: The safetensors code of its dtype, or the dtype's name, such as `key<fry>` for the data of PRNG keys.
        dtype: The NumPy dtype; None if JAX cannot hold it.
        start: The offset in the file.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    file: str = ""
    start: int = 0

    @property
    def nbytes(self) -> int:
        bits = BITS[self.code] if self.dtype is None else 8 * self.dtype.itemsize
        return math.prod(self.shape) * bits // 8


Read = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Reads tensors: name → sharding, or None → an array with it, or the parts of this process; or a NumPy array."""


class Weights(NamedTuple):
    """The content of a header, or of all headers of an index (`path`), with tensors in the order of their bytes."""

    path: str
    files: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def read_header(path: str) -> Weights:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        text = _text(file, path, size)
    entries = parse_json(text, path)
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: {METADATA} in the header must map strings to strings, got {format_value(metadata)}")
    data = 8 + len(text)
    tensors = sorted(
        (_tensor(name, entry, path, data) for name, entry in entries.items()),
        key=lambda t: (t.start, t.nbytes),
    )
    _check_gaps(tensors, path, data, size)
    return Weights(path, (path,), {tensor.name: tensor for tensor in tensors}, metadata)


def parse_json(text: bytes, path: str) -> dict[str, Any]:
    """Parse a JSON object in which no key occurs twice, at any depth."""
    try:
        content = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        what = "UTF-8" if isinstance(error, UnicodeError) else "JSON with unique keys"
        raise ValueError(f"{path}: corrupted: is not {what} ({type(error).__name__}: {error})"[:500]) from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: corrupted: must be a JSON object, got {format_value(content)}")
    return content


def _text(file: BinaryIO, path: str, size: int) -> bytes:
    first = file.read(8)
    if len(first) < 8:
        raise ValueError(f"{path}: is truncated or not a safetensors file: it has {size} bytes")
    length = int.from_bytes(first, "little")
    if length > LARGEST:
        raise ValueError(
            f"{path}: is not a safetensors file, or its header is malicious: its header size is {length} bytes, and "
            f"{LARGEST} are allowed"
        )
    if length > size - 8:
        raise ValueError(f"{path}: is truncated: its header has {length} bytes, but the file has {size}")
    text = file.read(length)
    if len(text) < length:
        raise ValueError(f"{path}: is truncated: its header has {length} bytes, but only {len(text)} could be read")
    if not text.lstrip(b" \t\r\n").startswith(b"{"):  # writers pad, also in front
        raise ValueError(f"{path}: is not a safetensors file: its header begins with {format_value(text[:20])}")
    return text


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    merged = dict(pairs)
    if len(merged) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{format_value(twice)} occurs twice, and readers may use either value")
    return merged


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _tensor(name: str, entry: object, path: str, data: int) -> Tensor:
    where = f"{path}: corrupted: the tensor {format_value(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{where} must have dtype, shape and data_offsets, got {format_value(entry)}")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = BITS.get(code) if isinstance(code, str) else None
    if bits is None:
        raise ValueError(
            f"{where} has dtype {format_value(code)}, which safetensors does not have: it has {', '.join(BITS)}"
        )
    if not _are_counts(shape):
        raise ValueError(f"{where} has shape {format_value(shape)}: must be a list of integers ≥ 0")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where} has data_offsets {format_value(offsets)}: must be [begin, end] with 0 ≤ begin ≤ end")
    nbytes, needed = offsets[1] - offsets[0], math.prod(shape) * bits
    if nbytes * 8 != needed:
        raise ValueError(
            f"{where} has {nbytes} bytes by its data_offsets, and "
            f"{format_value(needed / 8 if needed % 8 else needed // 8)} "
            f"by its dtype {code} and shape {format_value(shape)}"
        )
    return Tensor(name, code, tuple(shape), _DTYPES.get(code), path, data + offsets[0])


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x <= _MAX_AXIS_SIZE for x in value)


def _check_gaps(tensors: Sequence[Tensor], path: str, data: int, size: int) -> None:
    at, before = data, "the header"
    for tensor in tensors:
        if tensor.start != at:
            what = "overlaps with" if tensor.start < at else f"begins {tensor.start - at} bytes behind"
            raise ValueError(f"{path}: corrupted: the tensor {format_value(tensor.name)} {what} {before}")
        at, before = tensor.start + tensor.nbytes, f"the tensor {format_value(tensor.name)}"
    if at > size:
        raise ValueError(f"{path}: is truncated: it has {size} bytes, but its tensors need {at}")
    if at < size:
        raise ValueError(f"{path}: corrupted: {size - at} bytes at its end belong to no tensor")


def in_groups(items: Iterable[tuple[str, int, _Item]], max_bytes: int) -> Iterator[dict[str, _Item]]:
    """Divide (name, bytes, item) into groups of at most `max_bytes` bytes, or of one item, with unique names."""
    group: dict[str, _Item] = {}
    left = max_bytes
    for name, nbytes, item in items:
        if group and (name in group or nbytes > left):
            yield group
            group, left = {}, max_bytes
        group[name] = item
        left -= nbytes
    if group:
        yield group


def confirm(paths: Iterable[str]) -> None:
    """Open files with the package, which reads only their headers."""
    safetensors = package()
    for path in paths:
        try:
            with safetensors.safe_open(path, framework="numpy"):
                pass
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path}: the safetensors package {safetensors.__version__} refuses it: {error}; a newer version may "
                "know its dtypes: pip install -U safetensors"
            ) from None


def package() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("weights need the safetensors package: pip install 'jstep[weights]'") from error
    return safetensors
