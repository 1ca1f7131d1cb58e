"""Safetensors files written byte by byte, also malformed ones."""

import json

import numpy as np
import safetensors

from jstep.weights.tensors import dtype_code


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_raw(path, header, data=b"", length=None):
    """Write a file of a header (a dict, or bytes) followed by data."""
    path.write_bytes(raw_file(header, data, length))
    return str(path)


def raw_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    return length.to_bytes(8, "little") + text + data


def write_index(path, weight_map):
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return str(path)


def write_arrays(path, **arrays):
    """Write a file of float32 arrays."""
    header, data = {}, b""
    for name, array in arrays.items():
        raw = np.asarray(array, np.float32).tobytes()
        header[name] = entry("F32", np.shape(array), (len(data), len(data) + len(raw)))
        data += raw
    return write_raw(path, header, data)


def is_known(dtype):
    """Whether the installed package knows a dtype: older ones lack some of 8 bits, and complex
    numbers."""
    try:
        safetensors.deserialize(raw_file({"x": entry(dtype_code(dtype), (0,), (0, 0))}))
    except safetensors.SafetensorError:
        return False
    return True


def same(x, y):
    x, y = np.asarray(x), np.asarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
