"""Fingerprints: 64M floats, compared with XLA's sum of the same bits, and a state of 300 leaves.

python benchmarks/bench_fingerprint.py
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from _timing import interleaved, report

import jstep

SIZE = 64 * 2**20


def repeated(function, *args):
    def run(calls):
        result = None
        for _ in range(calls):
            result = function(*args)
            jax.block_until_ready(result)
        return result

    return run


def large():
    host = np.random.default_rng(0).standard_normal(SIZE, np.float32)
    device = jnp.asarray(host)

    @jax.jit
    def sum_of_bits(x):
        return jax.lax.bitcast_convert_type(x, jnp.uint32).sum(dtype=jnp.uint32)

    @jax.jit
    def sum_of_squares(x):
        return jnp.sum(x * x)

    contenders = {
        "XLA's uint32 sum": repeated(sum_of_bits, device),
        "sum of squares, one read": repeated(sum_of_squares, device),
        "fingerprint, on the device": repeated(jstep.fingerprint, device),
    }
    bounds = {
        ("fingerprint, on the device", "XLA's uint32 sum"): 2.0,
        ("fingerprint, on the device", "sum of squares, one read"): None,
    }
    if jax.default_backend() == "cpu":
        contenders["fingerprint, in host memory"] = repeated(jstep.fingerprint, host)
        bounds["fingerprint, in host memory", "XLA's uint32 sum"] = 2.0
    return report("64M floats", interleaved(contenders, 1, 7), bounds, 1e3)


def many():
    tree = {f"layer{i}": {"w": jnp.ones((256, 256)), "b": jnp.ones(256)} for i in range(150)}
    return report(
        "300 leaves", interleaved({"fingerprint": repeated(jstep.fingerprint, tree)}, 3, 5), {}, 1e3
    )


if __name__ == "__main__":
    sys.exit(0 if large() & many() else 1)
