"""Tensors of safetensors files: headers, and parts of tensors."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jstep.core.placement import ShardBounds, lengths, slices
from jstep.core.tables import printable
from jstep.stores.files import open_regular

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
"""Code → dtype, for the codes that NumPy and JAX support."""
METADATA = "__metadata__"
LARGEST = 100_000_000
"""The maximum bytes of a header that the package accepts."""
_Item = TypeVar("_Item")


def dtype_code(dtype: DTypeLike) -> str | None:
    try:
        wanted = np.dtype(dtype).newbyteorder("=")
    except TypeError:
        return None
    return next((code for code, candidate in _DTYPES.items() if candidate == wanted), None)


class Tensor(NamedTuple):
    """A tensor in a file, or an array in a checkpoint; `dtype` is None if JAX does not support it.

    Attributes:
        name: Its name, or its path in the checkpoint.
        code: The safetensors code of its dtype, or the dtype's name, such as `key<fry>` for PRNG
            keys.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    file: str = ""
    start: int = 0

    @property
    def itemsize(self) -> int:
        return 1 if self.dtype is None else self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


Read = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Reads tensors: name → sharding, or None for NumPy arrays."""


def read_header(path: str) -> dict[str, Tensor]:
    with open_regular(path) as file:
        check_file(path)
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
    entries.pop(METADATA, None)
    tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        code = entry["dtype"]
        start = 8 + size + entry["data_offsets"][0]
        tensors[name] = Tensor(name, code, tuple(entry["shape"]), _DTYPES.get(code), path, start)
    return tensors


def check_file(path: str) -> None:
    """Let the package check the header of a file."""
    safetensors = package()
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{printable(path)}: is corrupted, or not readable by safetensors "
            f"{safetensors.__version__}, and newer versions know more dtypes: "
            f"{printable(error):.300}"
        ) from None


def package() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "weights need the safetensors package: pip install 'jstep[weights]'"
        ) from error
    return safetensors


def read_parts(
    tensor: Tensor, parts: Iterable[ShardBounds]
) -> dict[ShardBounds, np.ndarray[Any, Any]]:
    assert tensor.dtype is not None
    if tensor.nbytes == 0:  # nothing can be mapped
        return {part: np.empty(lengths(part), tensor.dtype) for part in parts}
    try:
        whole = np.memmap(tensor.file, tensor.dtype, "r", tensor.start, tensor.shape)
    except ValueError as error:
        raise ValueError(
            f"{printable(tensor.file)}: was truncated after its header was read: "
            f"{error}; load it again"
        ) from None
    arrays = {part: np.array(whole[slices(part)], tensor.dtype, order="C") for part in parts}
    if tensor.code == "BOOL":
        for array in arrays.values():
            if (array.view(np.uint8) > 1).any():
                raise ValueError(
                    f"{printable(tensor.file)}: corrupted: the tensor {tensor.name!r} has bools "
                    "that are neither 0 nor 1"
                )
    return arrays


def group_by_bytes(
    items: Iterable[tuple[str, int, _Item]], max_bytes: int
) -> Iterator[dict[str, _Item]]:
    """Divide (name, bytes, item) into groups of at most `max_bytes` bytes, with unique names."""
    group: dict[str, _Item] = {}
    left = max_bytes
    for name, nbytes, item in items:
        if group and (name in group or nbytes > left):
            yield group
            group = {}
            left = max_bytes
        group[name] = item
        left -= nbytes
    if group:
        yield group
