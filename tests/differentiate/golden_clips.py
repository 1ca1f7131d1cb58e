"""Trees whose clipped values and norms are known, recorded at 6faa73db by `python
tests/differentiate/golden_clips.py`.

The numbers are small integers times powers of two: their squares add up exactly, in any order, on
any device.
"""

import hashlib
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

PATH = pathlib.Path(__file__).with_suffix(".json")
EXPONENTS = [-60, -34, -31, -20, 0, 20, 50]
"""Powers of two whose squares float32 holds."""


def integers(shape, seed):
    """Return integers from -7 to 7 of float64."""
    x = (np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    return ((x >> np.uint64(33)) % np.uint64(15)).astype(np.float64).reshape(shape) - 7


def trees(exponent):
    """Yield trees of arrays of that size: several dtypes, small and large leaves, ordinary ones
    beside them."""
    size = np.ldexp(1.0, exponent)
    a, b, c = integers((3, 5), 1) * size, integers((2000,), 2) * size, integers((7, 300), 3) * size
    with np.errstate(over="ignore", under="ignore"):
        small = {
            "a": a.astype(np.float32),
            "b": np.zeros((0, 3), np.float32),
            "c": (a[:1, :2] / 2).astype(np.float32),
        }
        large = {
            **{str(i): (a * i).astype(np.float32) for i in range(4)},
            "b": b.astype(np.float32),
            "c": c.astype(np.float32),
        }
        low = {"a": a.astype(jnp.bfloat16), "b": b.astype(jnp.bfloat16)}
        half = {"a": a.astype(np.float16), "c": c.astype(np.float16)}
        mixed = {
            "a": a.astype(np.float32),
            "b": b.astype(jnp.bfloat16),
            "z": (a + 1j * a[::-1]).astype(np.complex64),
        }
        beside = {"a": a.astype(np.float32), "b": integers((40, 40), 4).astype(np.float32)}
    yield from {
        "small": small,
        "large": large,
        "bfloat16": low,
        "mixed": mixed,
        "beside": beside,
    }.items()
    if -24 <= exponent <= 12:
        yield "float16", half
    for name, bad in (("inf", np.inf), ("nan", np.nan)):
        yield (
            name,
            {"a": np.where(a == 7 * size, bad, a).astype(np.float32), "c": c.astype(np.float32)},
        )
    if exponent == 0:
        yield "zeros", {"a": np.zeros((3, 5), np.float32), "b": np.zeros(2000, jnp.bfloat16)}
        yield "empty", {"a": np.zeros((0, 5), np.float32)}


def clips():
    """Return the functions: a tree to the clipped tree and, where there is one, its norm."""
    import jstep

    limits = {"1": 1.0, "1e-20": 1e-20, "1e-36": 1e-36, "1e20": 1e20}
    found = {
        f"global {name}": lambda t, c=c: jstep.clip_by_global_norm(t, c)
        for name, c in limits.items()
    }
    found |= {
        f"leaf {name}": lambda t, c=c: (jstep.clip_by_norm(t, c), None)
        for name, c in limits.items()
    }
    found |= {
        f"rows {name}": lambda t, c=c: (jstep.clip_by_norm(t, c, axes=0), None)
        for name, c in limits.items()
    }
    return {**found, "average": lambda t: (jstep.clip_by_average_norm(t, 0.01), None)}


def _summary(clipped, norm):
    """Return a hash of all values, in which one NaN is like another, and the norm."""
    digest = hashlib.blake2b(digest_size=6)
    for leaf in jax.tree.leaves(clipped):
        found = np.array(leaf)
        found[np.isnan(found)] = np.nan
        digest.update(found.tobytes())
    return digest.hexdigest() + ("" if norm is None else f" {float(norm).hex()}")


def recorded(names=None, exponents=EXPONENTS):
    """Return the summary of each case: exponent, tree and clip."""
    found = {}
    for name, clip in clips().items():
        if names is None or name in names:
            compiled = jax.jit(clip)
            for exponent in exponents:
                for kind, tree in trees(exponent):
                    found[f"2^{exponent} {kind} {name}"] = _summary(*compiled(tree))
    return found


if __name__ == "__main__":
    json.dump(recorded(), sys.stdout, indent=0)
