"""The dtypes of safetensors, and the equivalent NumPy dtypes."""

import functools
from typing import Any

import numpy as np

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
