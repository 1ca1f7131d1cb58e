"""The dtypes of safetensors, and those of NumPy with the same bits."""

from typing import Any

import jax.numpy as jnp
import numpy as np

_NUMPY: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "F8_E4M3FNUZ": jnp.float8_e4m3fnuz,
    "F8_E5M2FNUZ": jnp.float8_e5m2fnuz,
}
_PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of an element where several share a byte: their sizes can be checked, and JAX cannot hold them as they are."""

_DTYPES = {code: np.dtype(dtype) for code, dtype in _NUMPY.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def bits_of(code: str) -> int | None:
    """The bits of an element; None of a dtype that safetensors does not have."""
    return _DTYPES[code].itemsize * 8 if code in _DTYPES else _PACKED.get(code)


def dtype_of(code: str) -> np.dtype[Any] | None:
    """The dtype of NumPy; None where elements are smaller than a byte."""
    return _DTYPES.get(code)


def code_of(dtype: Any) -> str | None:
    """What safetensors calls a dtype; None where it has none like it (PRNG keys, int4, complex128)."""
    try:
        return _CODES.get(np.dtype(dtype).newbyteorder("="))
    except TypeError:
        return None


def known() -> str:
    """All codes of dtypes, for errors."""
    return ", ".join([*_DTYPES, *_PACKED])
