"""CPU seconds of compiling Adam, clipped (beside Optax) and searched by `find_nonfinite`, and of
first fingerprints.

Two sizes and the exponent of each; the last line has the memory of the first fingerprint of 64 MiB.

python benchmarks/bench_compile_growth.py
"""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
from _timing import cpu_seconds, optax_step

import jstep

SIZES = (20, 40) if os.environ.get("JSTEP_QUICK_BENCHMARKS") else (100, 1000)


def params_of(count: int) -> dict[str, jax.Array]:
    """Return matrices and vectors, half of each."""
    return {f"{i}": jnp.ones((64, 64) if i % 2 else (64,)) for i in range(count)}


def clip_of_jstep(count: int) -> float:
    """Compile Adam with a clipped global norm."""
    optimizer, params = (
        jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(1e-3)),
        params_of(count),
    )
    state = jstep.TrainState.create(params, optimizer)
    step = jax.jit(
        lambda state, grads: jstep.apply_gradients(state, grads, optimizer), donate_argnums=0
    )
    return cpu_seconds(lambda: step.lower(state, params).compile() and None)


def clip_of_optax(count: int) -> float:
    """Compile Optax's Adam with a clipped global norm."""
    optimizer, params = (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        params_of(count),
    )
    step = jax.jit(optax_step(optimizer), donate_argnums=0)
    return cpu_seconds(
        lambda: step.lower((params, optimizer.init(params)), params).compile() and None
    )


def first_fingerprint(count: int) -> float:
    """Take the fingerprint of leaves of ten shapes."""
    jax.clear_caches()
    tree = {f"{i}": jnp.ones((i % 10 + 1, 64)) for i in range(count)}
    return cpu_seconds(lambda: jstep.fingerprint(tree))


def adam_step(count: int) -> tuple[jstep.TrainStep, jstep.TrainState]:
    """Return an Adam step and its state."""
    optimizer = jstep.adam(1e-3)
    step = jstep.minimize(
        lambda params, x: sum(jnp.sum(leaf * x) for leaf in params.values()), optimizer
    )
    return step, jax.block_until_ready(jstep.TrainState.create(params_of(count), optimizer))


def compile_adam(count: int) -> float:
    """Compile an Adam step, the peer of `find_nonfinite`."""
    step, state = adam_step(count)
    return cpu_seconds(lambda: step.lower(state, 1.0).compile() and None)


def find_none(count: int) -> float:
    """Look for a non-finite number in an Adam step that has none."""
    step, state = adam_step(count)
    return cpu_seconds(lambda: jstep.find_nonfinite(step, state, 1.0))


def find_one(count: int) -> float:
    """Find an infinity in the gradient's second moment of an Adam step."""
    step, state = adam_step(count)
    return cpu_seconds(lambda: jstep.find_nonfinite(step, state, 1e30) and None)


# `ru_maxrss` would include the memory of the parent process.
LARGE_FINGERPRINT = """
import pathlib, time, jax, jax.numpy as jnp, jstep

def peak():
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

tree = jax.block_until_ready({"w": jnp.ones(64 * 2**18)})
before, start = peak(), time.process_time()
jstep.fingerprint(tree)
print(time.process_time() - start, (peak() - before) / 2**16)
"""


def large_fingerprint() -> tuple[float, float]:
    """Return CPU seconds of the first fingerprint of 64 MiB, and its peak memory as a multiple of
    the array's."""
    found = subprocess.run(
        [sys.executable, "-c", LARGE_FINGERPRINT], check=True, capture_output=True, text=True
    )
    cpu, memory = map(float, found.stdout.split())
    return cpu, memory


ROWS = {
    "clipped Adam, jstep": clip_of_jstep,
    "clipped Adam, Optax": clip_of_optax,
    "a first fingerprint": first_fingerprint,
    "Adam": compile_adam,
    "find_nonfinite, None": find_none,
    "find_nonfinite, found": find_one,
}


def main() -> None:
    """Print a row for each item."""
    small, large = SIZES
    for name, measured in ROWS.items():
        first, second = measured(small), measured(large)
        exponent = math.log(second / first) / math.log(large / small)
        print(
            f"{name:22s} {small} leaves {first:.2f} s, {large} leaves {second:.2f} s, "
            f"exponent {exponent:.2f}"
        )
    cpu, memory = large_fingerprint()
    print(f"a first fingerprint of 64 MiB: {cpu:.2f} s, memory {memory:.2f} times the array")


if __name__ == "__main__":
    main()
