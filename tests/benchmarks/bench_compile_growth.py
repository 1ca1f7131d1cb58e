"""CPU seconds of compiling a clipped Adam step beside Optax's, and of first fingerprints: two sizes and the exponent.

python tests/benchmarks/bench_compile_growth.py
"""

import math
import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import jstep

SIZES = (20, 40) if os.environ.get("JSTEP_QUICK_BENCHMARKS") else (100, 1000)


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call and of what it starts."""
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start


def params_of(count: int) -> dict[str, jax.Array]:
    """Return matrices and vectors, half of each."""
    return {f"{i}": jnp.ones((64, 64) if i % 2 else (64,)) for i in range(count)}


def clip_of_jstep(count: int) -> float:
    """Compile Adam with a clipped global norm."""
    optimizer, params = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(1e-3)), params_of(count)
    state = jstep.TrainState.create(params, optimizer)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer), donate_argnums=0)
    return seconds(lambda: step.lower(state, params).compile() and None)


def clip_of_optax(count: int) -> float:
    """Compile Optax's Adam with a clipped global norm."""
    optimizer, params = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), params_of(count)

    def step(params, slots, grads):
        updates, slots = optimizer.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots

    compiled = jax.jit(step, donate_argnums=(0, 1))
    return seconds(lambda: compiled.lower(params, optimizer.init(params), params).compile() and None)


def first_fingerprint(count: int) -> float:
    """Take the fingerprint of leaves of ten shapes."""
    jax.clear_caches()
    tree = {f"{i}": jnp.ones((i % 10 + 1, 64)) for i in range(count)}
    return seconds(lambda: jstep.fingerprint(tree))


ROWS = {
    "clipped Adam, jstep": clip_of_jstep,
    "clipped Adam, Optax": clip_of_optax,
    "a first fingerprint": first_fingerprint,
}


def main() -> None:
    """Print a row for each item."""
    small, large = SIZES
    for name, measured in ROWS.items():
        first, second = measured(small), measured(large)
        exponent = math.log(second / first) / math.log(large / small)
        print(f"{name:22s} {small} leaves {first:.2f} s, {large} leaves {second:.2f} s, exponent {exponent:.2f}")


if __name__ == "__main__":
    main()
