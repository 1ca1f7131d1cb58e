"""Adam over 1000 leaves of 1000 floats, compared with Optax: tracing, compiling, and a step.

python tests/benchmarks/bench_leaves.py
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax
from _timing import interleaved, report

import jstep

N = 1000


def params():
    return {f"leaf{i}": jnp.full(1000, i / N) for i in range(N)}


def ours():
    optimizer = jstep.adam(1e-3)

    def step(state, grads):
        return jstep.apply_gradients(state, grads, optimizer)

    return step, jstep.TrainState.create(params(), optimizer)


def theirs():
    optimizer = optax.adam(1e-3)

    def step(state, grads):
        params, slots = state
        updates, slots = optimizer.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots

    return step, (params(), optimizer.init(params()))


def compile_times(make, grads):
    step, state = make()
    # A new function each time avoids cache hits.
    jitted = jax.jit(lambda state, grads: step(state, grads), donate_argnums=0)
    start = time.perf_counter()
    traced = jitted.trace(state, grads)
    lowered = traced.lower()
    middle = time.perf_counter()
    compiled = lowered.compile()
    return middle - start, time.perf_counter() - middle, compiled, state


def main():
    grads = {name: jnp.ones_like(leaf) for name, leaf in params().items()}
    times = {"jstep": [], "Optax": []}
    parts = {"jstep": [], "Optax": []}
    for _ in range(4):
        for name, make in (("jstep", ours), ("Optax", theirs)):
            jax.clear_caches()
            trace, compile_, *_ = compile_times(make, grads)
            times[name].append(trace + compile_)
            parts[name].append((trace, compile_))
    good = report("1000 leaves of 1000 floats, Adam: trace, lower and compile", times, {("jstep", "Optax"): 0.68}, 1e3)
    for name, pairs in parts.items():
        trace, compile_ = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
        print(f"  {name}: trace and lower {trace:.0f} ms, compile {compile_:.0f} ms")

    def runner(make):
        *_, compiled, state = compile_times(make, grads)
        held = [state]

        def run(calls):
            for _ in range(calls):
                held[0] = compiled(held[0], grads)
            return held[0]

        return run

    steps = interleaved({"jstep": runner(ours), "Optax": runner(theirs)}, calls=30)
    return report("1000 leaves of 1000 floats, Adam: a step", steps, {("jstep", "Optax"): 0.97}, 1e3) and good


if __name__ == "__main__":
    sys.exit(not main())
