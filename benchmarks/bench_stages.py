"""The first step of a stage whose program takes seconds to compile, compared with the median step
of the stage.

    python benchmarks/bench_stages.py

There are two stage changes: another train step of the same size, and batches of twice the size.
Both programs are compiled in the background during the earlier steps, so the first step of a stage
need not wait for XLA.

On XLA's CPU backend the first run of a program takes 30 to 300 ms longer than later ones, also in
plain JAX and however long ago it was compiled. Steps are long here (many microbatches), as in
programs that take seconds to compile.
"""

import functools
import statistics
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from _timing import report

import jstep

LAYERS, WIDTH, ROWS, MICROBATCHES = 96, 256, 2048, 128
STEP_EDGE, SIZE_EDGE, LAST = 150, 250, 280
ROUNDS = 3


def loss_fn(params, x, *, scale):
    for w in params:  # unrolled to take long to compile
        x = jnp.tanh(x * w[None]) + 0.5 * jnp.roll(x, 1, axis=1)
    return scale * jnp.mean(x**2)


def step_of(optimizer, scale):
    """Return a step whose program depends on the scale, so that none comes from a cache."""
    return jstep.minimize(
        functools.partial(loss_fn, scale=scale), optimizer, num_microbatches=MICROBATCHES
    )


class Steps(jstep.Hook):
    """Records the seconds of each step, indexed by the step at which it starts; waits for each
    state."""

    def begin(self, state):
        self.seconds, self._then = [], time.perf_counter()

    def after_step(self, step, state, metrics):
        jax.block_until_ready(state)
        now = time.perf_counter()
        self.seconds.append(now - self._then)
        self._then = now


def one_round(number, compiled):
    """Return the seconds of the steps and of background compilations, in order; these may include
    the first program."""
    optimizer = jstep.adam(1e-4)
    weights = list(np.random.default_rng(1).normal(size=(LAYERS, WIDTH)).astype(np.float32))
    data = jstep.batches(
        np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32),
        {0: ROWS, SIZE_EDGE: 2 * ROWS},
    )
    stages = {0: step_of(optimizer, 1.0 + number), STEP_EDGE: step_of(optimizer, 1.5 + number)}
    steps = Steps()
    del compiled[:]
    jstep.train(
        stages,
        jstep.TrainState.create(weights, optimizer),
        data,
        LAST,
        hooks=[steps],
        progress=False,
    )
    return steps.seconds, list(compiled)


def main():
    compiled = []

    def listener(event, duration, **_):
        if (
            event == "/jax/core/compile/backend_compile_duration"
            and threading.current_thread().name == "jstep-compile"
        ):
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listener)
    edges = {
        "another train step": (STEP_EDGE, SIZE_EDGE),
        "batches of twice the size": (SIZE_EDGE, LAST),
    }
    times = {name: {"median step": [], "step at the edge": [], "compilation": []} for name in edges}
    for number in range(ROUNDS):
        seconds, programs = one_round(number, compiled)
        assert len(edges) <= len(programs) <= len(edges) + 1, programs
        pairs = zip(edges.items(), programs[-len(edges) :], strict=True)
        for (name, (edge, stop)), compilation in pairs:
            times[name]["median step"].append(statistics.median(seconds[edge + 1 : stop]))
            times[name]["step at the edge"].append(seconds[edge])
            times[name]["compilation"].append(compilation)
    bound = {("step at the edge", "median step"): 2.0}
    shown = {("compilation", "median step"): None}
    good = [report(name, found, bound | shown, 1e3) for name, found in times.items()]
    return all(good)


if __name__ == "__main__":
    sys.exit(not main())
