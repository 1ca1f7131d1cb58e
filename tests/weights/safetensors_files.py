"""Safetensors files made by hand: also such as no writer makes."""

import json

import numpy as np


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def made(path, header, data=b"", length=None):
    """A file with this header (a dict, or bytes) and these bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return str(path)


def index(path, weight_map):
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return str(path)


def single(path, **arrays):
    """A file of float32 arrays."""
    header, data = {}, b""
    for name, array in arrays.items():
        raw = np.asarray(array, np.float32).tobytes()
        header[name] = entry("F32", np.shape(array), (len(data), len(data) + len(raw)))
        data += raw
    return made(path, header, data)


def same(x, y):
    x, y = np.asarray(x), np.asarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
