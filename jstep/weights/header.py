"""Reading and validation of the header of a safetensors file, which is untrusted input, and its dtypes.

A file is 8 bytes with the size of the header, the header in JSON, and the bytes of the tensors without gaps.
"""

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jstep.core.checks import shown

_NAMES = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
}
"""Code → name of the dtype, bits per element. Headers are read without importing JAX, which provides some dtypes."""
_PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of packed dtypes, several elements per byte: sizes can be checked, but JAX cannot hold them."""


def bits_of(code: str) -> int | None:
    """Return the bits per element; None for a dtype that safetensors does not have."""
    return _NAMES[code][1] if code in _NAMES else _PACKED.get(code)


def name_of(code: str) -> str | None:
    """Return the name of the dtype; None if elements are smaller than a byte."""
    return _NAMES[code][0] if code in _NAMES else None


def dtype_of(code: str) -> np.dtype[Any] | None:
    """Return the NumPy dtype; None if elements are smaller than a byte."""
    return _dtypes().get(code)


def code_of(dtype: Any) -> str | None:
    """Return the safetensors code of a dtype; None if there is no equivalent (PRNG keys, int4, complex128)."""
    try:
        return _codes().get(np.dtype(dtype).newbyteorder("="))
    except TypeError:
        return None


def known() -> str:
    """Return all dtype codes, for errors."""
    return ", ".join([*_NAMES, *_PACKED])


@functools.cache
def _dtypes() -> dict[str, np.dtype[Any]]:
    import jax.numpy as jnp

    return {code: np.dtype(jnp.dtype(name)) for code, (name, _) in _NAMES.items()}


@functools.cache
def _codes() -> dict[np.dtype[Any], str]:
    return {dtype: code for code, dtype in _dtypes().items()}


METADATA = "__metadata__"
LARGEST = 100_000_000
"""Maximum bytes of a header; the `safetensors` package refuses larger ones, too."""
_LONGEST_AXIS = 2**63 - 1


class Tensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        name: Its name.
        code: The safetensors code of its dtype.
        shape: Its shape.
        file: The path of its file.
        start: The offset of its first byte in the file.
        nbytes: Its number of bytes.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The NumPy dtype; None if JAX cannot hold it."""
        return dtype_of(self.code)


class Header(NamedTuple):
    """The content of a header.

    Attributes:
        file: The path of the file.
        tensors: The tensors by name, in the order of their bytes.
        metadata: The metadata strings.
    """

    file: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


class _DuplicateError(ValueError):
    """A key occurs twice in a JSON object."""


def read_header(path: str) -> Header:
    """Read and check the header of a file.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
        ValueError: It is not a safetensors file, is truncated, or its header contradicts itself; names the file.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        text = _text(file, path, size)
    entries = parsed(text, path)
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: {METADATA} in the header must map strings to strings, got {shown(metadata)}")
    data = 8 + len(text)
    tensors = sorted((_tensor(name, entry, path, data) for name, entry in entries.items()), key=_place)
    _check_gaps(tensors, path, data, size)
    return Header(path, {tensor.name: tensor for tensor in tensors}, metadata)


def parsed(text: bytes, path: str) -> dict[str, Any]:
    """Parse a JSON object in which no key occurs twice, at any depth.

    Raises:
        ValueError: It is not such an object; names the file.
    """
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        json.dumps(found, ensure_ascii=False).encode()
    except _DuplicateError as error:
        raise ValueError(f"{path}: corrupted: {error} occurs twice, and readers may use either value") from None
    except UnicodeError:
        raise ValueError(f"{path}: corrupted: is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: corrupted: is not JSON ({type(error).__name__}: {error})"[:500]) from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: corrupted: must be a JSON object, got {shown(found)}")
    return found


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
    if not text.startswith(b"{"):
        raise ValueError(f"{path}: is not a safetensors file: its header begins with {shown(text[:20])}")
    return text


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _DuplicateError(shown(Counter(key for key, _ in pairs).most_common(1)[0][0]))
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _tensor(name: str, entry: Any, path: str, data: int) -> Tensor:
    where = f"{path}: corrupted: the tensor {shown(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{where} must have dtype, shape and data_offsets, got {shown(entry)}")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = bits_of(code) if isinstance(code, str) else None
    if bits is None:
        raise ValueError(f"{where} has dtype {shown(code)}, which safetensors does not have: it has {known()}")
    if not _are_counts(shape):
        raise ValueError(f"{where} has shape {shown(shape)}: must be a list of integers ≥ 0")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where} has data_offsets {shown(offsets)}: must be [begin, end] with 0 ≤ begin ≤ end")
    nbytes, needed = offsets[1] - offsets[0], math.prod(shape) * bits
    if nbytes * 8 != needed:
        raise ValueError(
            f"{where} has {nbytes} bytes by its data_offsets, and {shown(needed / 8 if needed % 8 else needed // 8)} "
            f"by its dtype {code} and shape {shown(shape)}"
        )
    return Tensor(name, code, tuple(shape), path, data + offsets[0], nbytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x <= _LONGEST_AXIS for x in value)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.start, tensor.nbytes


def _check_gaps(tensors: Sequence[Tensor], path: str, data: int, size: int) -> None:
    at, before = data, "the header"
    for tensor in tensors:
        if tensor.start != at:
            what = "overlaps with" if tensor.start < at else f"begins {tensor.start - at} bytes behind"
            raise ValueError(f"{path}: corrupted: the tensor {shown(tensor.name)} {what} {before}")
        at, before = tensor.start + tensor.nbytes, f"the tensor {shown(tensor.name)}"
    if at > size:
        raise ValueError(f"{path}: is truncated: it has {size} bytes, but its tensors need {at}")
    if at < size:
        raise ValueError(f"{path}: corrupted: {size - at} bytes at its end belong to no tensor")


def confirm(paths: Iterable[str]) -> None:
    """Open files with the package, which reads only their headers.

    Raises:
        ImportError: The package is not installed.
        ValueError: The package refuses a file.
    """
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
    """Import the package.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("weights need the safetensors package: pip install 'jstep[weights]'") from error
    return safetensors
