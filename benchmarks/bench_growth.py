"""CPU seconds of costs of the host that grow with the work, at two sizes, and the exponent: below
1.2 is linear.

python benchmarks/bench_growth.py
"""

import contextlib
import io
import math
import os
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _timing import cpu_seconds

import jstep
from jstep import summary
from jstep.array_store.manifest import RetainedSteps
from jstep.checkpoint.retention import plan_evictions
from jstep.data.batches import Mixture
from jstep.look.cli import main as command

QUICK = bool(os.environ.get("JSTEP_QUICK_BENCHMARKS"))


def params_of(count: int) -> dict[str, jax.Array]:
    """Return leaves of ten shapes."""
    return {f"{i}": jnp.ones((i % 10 + 1, 8)) for i in range(count)}


def diff(count: int) -> float:
    """Compare two checkpoints of Adam."""
    with tempfile.TemporaryDirectory() as folder:
        state = jstep.TrainState.create(params_of(count), jstep.adam(1e-3))
        for name in "ab":
            with jstep.Saver(f"{folder}/{name}") as saver:
                saver.save(state)
        with contextlib.redirect_stdout(io.StringIO()):
            return cpu_seconds(lambda: command(["diff", f"{folder}/a", f"{folder}/b"]))


def save(count: int) -> float:
    """Choose what a save removes among the checkpoints that are kept."""
    kept = dict.fromkeys(range(count), 0.0)
    return cpu_seconds(
        lambda: (
            plan_evictions(kept, count - 1, RetainedSteps(frozenset(), 0.0), count + 2, None)
            and None
        )
    )


def scalar(count: int) -> float:
    """Make a summary of many tags."""
    tags, values = [f"tag {n}" for n in range(count)], [0.5] * count
    return cpu_seconds(lambda: summary.scalar(tags, values, collections=()) and None)


def _mixture(count: int) -> Mixture:
    sources = {f"{n}": {"x": np.arange(20)} for n in range(count)}
    return jstep.mixture(sources, 256, {name: n + 1 for n, name in enumerate(sources)})


def make_mixture(count: int) -> float:
    """Make a mixture."""
    return cpu_seconds(lambda: _mixture(count) and None)


def mixture_batch(count: int) -> float:
    """Draw a batch at random; the mean of five."""
    batches = _mixture(count)
    batches[0]
    return cpu_seconds(lambda: [batches[n] for n in (10, 1000, 20, 500, 7)] and None) / 5


def create(count: int) -> float:
    """Create a state of Adam."""
    params, optimizer = params_of(count), jstep.adam(1e-3)
    jstep.TrainState.create(params_of(10), optimizer)
    return cpu_seconds(lambda: jstep.TrainState.create(params, optimizer))


def create_by_optax(count: int) -> float:
    """Copy the parameters and create Optax's state of Adam."""
    params, optimizer = params_of(count), optax.adam(1e-3)
    optimizer.init(params_of(10))
    return cpu_seconds(lambda: (jax.tree.map(jnp.copy, params), optimizer.init(params)))


def piecewise(count: int) -> float:
    """Evaluate a schedule of plain numbers eagerly."""
    schedule = jstep.piecewise_constant([*range(count - 1)], [0.5] * count)
    schedule(3)
    return cpu_seconds(lambda: schedule(5))


def compile_piecewise(count: int) -> float:
    """Compile it."""
    schedule = jstep.piecewise_constant([*range(count - 1)], [0.5] * count)
    return cpu_seconds(lambda: jax.jit(schedule).lower(jnp.int32(3)).compile() and None)


ROWS: dict[str, tuple[Callable[[int], float], int, int, str]] = {
    "diff, Adam leaves": (diff, 500, 2_000, "s"),
    "a save, kept": (save, 500, 5_000, "s"),
    "summary.scalar, tags": (scalar, 1_000, 10_000, "s"),
    "mixture, sources": (make_mixture, 100, 1_000, "s"),
    "its batch of 256, sources": (mixture_batch, 100, 1_000, "s"),
    "TrainState.create, Adam, leaves": (create, 500, 5_000, "s"),
    "a copy and Optax's init, leaves": (create_by_optax, 500, 5_000, "s"),
    "piecewise_constant, values": (piecewise, 100, 1_000, "s"),
    "compiling it, values": (compile_piecewise, 100, 1_000, "s"),
}


def main() -> None:
    """Print a row for each item."""
    print(f"load {os.getloadavg()[0]:.1f}")
    for name, (measured, small, large, unit) in ROWS.items():
        if QUICK:
            small, large = small // 10, small // 5
        first, second = measured(small), measured(large)
        exponent = math.log(max(second, 1e-9) / max(first, 1e-9)) / math.log(large / small)
        print(
            f"{name:32s} {small} {first:.4f} {unit}, "
            f"{large} {second:.4f} {unit}, exponent {exponent:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
