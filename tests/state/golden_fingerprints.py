"""Trees and their fingerprints, recorded at 6faa73db by `tests/state/golden_fingerprints.py`.

They are on users' disks, in logs and in manifests of checkpoints, and must never change.
"""

import json
import pathlib
import sys

import jax
import ml_dtypes
import numpy as np

import jstep

PATH = pathlib.Path(__file__).with_suffix(".json")
PLAIN = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32",
    "complex64",
]  # fmt: skip
LOW = [
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
]
NARROW = ["float4_e2m1fn", "int4", "uint4", "int2", "uint2"]
WIDE = ["int64", "uint64", "float64", "complex128"]
SHAPES = [(), (0,), (0, 3), (1,), (7,), (8, 16), (3, 4, 5), (2, 1, 3, 1, 2)]
LARGE = (70_001,)
"""More elements than a chunk of the host or a block of XLA's reductions."""


def _dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def _words(shape, size):
    """Return bytes that look random, `[*shape, size]`."""
    x = np.arange(int(np.prod(shape)) * size, dtype=np.uint64)
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return ((x ^ (x >> np.uint64(29))) >> np.uint64(17)).astype(np.uint8).reshape(*shape, size)


def array(name, shape):
    """Return an array with bits of all kinds: NaNs, infinities, denormal numbers, both zeros."""
    dtype = _dtype(name)
    if name == "bool" or name in NARROW:
        values = _words(shape, 1)[..., 0] % {"bool": 2, "int2": 2, "uint2": 4}.get(name, 7)
        return values.astype(np.float32).astype(dtype)
    return _words(shape, dtype.itemsize).reshape(-1).view(dtype).reshape(shape)


def trees():
    """Return trees of NumPy arrays: one for each dtype, and a state of many leaves of few
    shapes."""
    found = {
        name: {str(shape): array(name, shape) for shape in SHAPES}
        for name in [*PLAIN, *LOW, *NARROW, *WIDE]
    }
    for name in ("float32", "bfloat16", "int8", "complex64"):
        found[name]["large"] = array(name, LARGE)
    state = {
        f"layer{i}": {"w": array("float32", (16, 8)) + np.float32(i), "b": array("bfloat16", (8,))}
        for i in range(5)
    }
    return {**found, "state": {"params": state, "global_step": np.int32(7)}}


def key_trees():
    """Return trees of PRNG keys, for each implementation."""
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    return {
        f"keys of {name}": {
            "key": jax.random.key(3, impl=name),
            "keys": jax.random.split(jax.random.key(4, impl=name), 3),
        }
        for name in names
    }


def hexadecimal(pair):
    """Format a fingerprint as in logs."""
    a, b = np.asarray(pair)
    return f"{a:08x}{b:08x}"


def texts(tree):
    """Return the fingerprint of a tree, at the empty path, and those of its leaves."""
    leaves = jstep.fingerprint(tree, per_leaf=True)
    return {
        "": hexadecimal(jstep.fingerprint(tree)),
        **{path: hexadecimal(one) for path, one in leaves.items()},
    }


if __name__ == "__main__":
    json.dump(
        {name: texts(tree) for name, tree in {**trees(), **key_trees()}.items()},
        sys.stdout,
        indent=0,
    )
