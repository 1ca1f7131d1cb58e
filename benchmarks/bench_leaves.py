"""Adam with many leaves: 100, 300 and 1000 leaves of 1000 floats, compared with Optax in tracing,
compiling and a step.

    python benchmarks/bench_leaves.py

`optax.flatten` is what Optax's documentation recommends for many small leaves: it updates one array
with all of them.
"""

import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax
from _timing import interleaved, optax_step, report, runner

import jstep

SIZES = (100, 300, 1000)


def params(n):
    return {f"leaf{i}": jnp.full(1000, i / n) for i in range(n)}


def ours(n):
    optimizer = jstep.adam(1e-3)

    def step(state, grads):
        return jstep.apply_gradients(state, grads, optimizer)

    return step, jstep.TrainState.create(params(n), optimizer)


def theirs(n, flatten=False):
    optimizer = optax.flatten(optax.adam(1e-3)) if flatten else optax.adam(1e-3)
    return optax_step(optimizer), (params(n), optimizer.init(params(n)))


def compile_times(make, n, grads):
    step, state = make(n)
    # A new function each time avoids cache hits.
    jitted = jax.jit(lambda state, grads: step(state, grads), donate_argnums=0)
    start = time.perf_counter()
    traced = jitted.trace(state, grads)
    lowered = traced.lower()
    middle = time.perf_counter()
    compiled = lowered.compile()
    return middle - start, time.perf_counter() - middle, compiled, state


def measure(n):
    """Print the ratios for so many leaves; return whether the bounds hold."""
    grads = {name: jnp.ones_like(leaf) for name, leaf in params(n).items()}
    makers = {
        "jstep": ours,
        "Optax": theirs,
        "optax.flatten": functools.partial(theirs, flatten=True),
    }
    times, parts = {name: [] for name in makers}, {name: [] for name in makers}
    for _ in range(4):
        for name, make in makers.items():
            jax.clear_caches()
            trace, compile_, *_ = compile_times(make, n, grads)
            times[name].append(trace + compile_)
            parts[name].append((trace, compile_))
    bounds = {("jstep", "Optax"): 0.68 if n == 1000 else 0.9, ("jstep", "optax.flatten"): None}
    good = report(f"{n} leaves of 1000 floats, Adam: trace, lower and compile", times, bounds, 1e3)
    for name, pairs in parts.items():
        trace, compile_ = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
        print(f"  {name}: trace and lower {trace:.0f} ms, compile {compile_:.0f} ms")

    compiled = {name: compile_times(make, n, grads)[2:] for name, make in makers.items()}
    steps = interleaved(
        {name: runner(step, state, grads) for name, (step, state) in compiled.items()}, calls=30
    )
    bounds = {("jstep", "Optax"): 1.0, ("jstep", "optax.flatten"): 1.0}
    return report(f"{n} leaves of 1000 floats, Adam: a step", steps, bounds, 1e3) and good


def main():
    good = True
    for n in SIZES:
        good &= measure(n)
    return good


if __name__ == "__main__":
    sys.exit(not main())
