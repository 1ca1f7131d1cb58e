"""CPU seconds of costs of the host that grow with the work, at two sizes, and the exponent: below 1.2 is linear.

python benchmarks/bench_growth.py
"""

import contextlib
import io
import json
import math
import os
import pathlib
import tempfile
import tracemalloc
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _timing import cpu_seconds

import jstep
from jstep import summary
from jstep.checkpoint.manifest import RetainedSteps
from jstep.checkpoint.retention import evictions
from jstep.data.batches import Mixture
from jstep.stores.timeline import TIMELINE_FILE as TIMELINE
from jstep.stores.timeline_writer import Timeline
from jstep.tools.cli import main as command

QUICK = bool(os.environ.get("JSTEP_QUICK_BENCHMARKS"))


def params_of(count: int) -> dict[str, jax.Array]:
    """Return leaves of ten shapes."""
    return {f"{i}": jnp.ones((i % 10 + 1, 8)) for i in range(count)}


def timeline(count: int) -> float:
    """Return the bytes a second of a timeline whose times are updated once in each of so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Timeline(folder, "model")
        lines.write("start", version=1, time=1.0, step=None, seconds={})
        for n in range(count):
            seconds = {"stepping": 0.9 * n, "saving": 0.1 * n}
            lines.update(step=[0, n], time=1.0 + n, seconds=seconds)
        lines.close()
        return pathlib.Path(folder, TIMELINE).stat().st_size / count


def memory_for(count: int, read: Callable[[str], object]) -> float:
    """Return the memory of reading a folder with a timeline of so many lines, in times the file."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, TIMELINE)
        step = {"start": "a", "prefix": "model", "kind": "parts", "process_count": 1, "step": [0, 1]}
        lines = ({**step, "time": 1.0 + n, "seconds": {"stepping": 0.9 * n, "saving": 0.1 * n}} for n in range(count))
        first = {
            "version": 1,
            "start": "a",
            "prefix": "model",
            "kind": "start",
            "time": 1.0,
            "step": None,
            "seconds": {},
        }
        file.write_text("".join(json.dumps(line) + "\n" for line in (first, *lines)))
        read(folder)
        tracemalloc.start()
        read(folder)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak / file.stat().st_size


def goodput(count: int) -> float:
    """Return the memory of `goodput`, in times the file."""
    return memory_for(count, jstep.goodput)


def start(count: int) -> float:
    """Return the memory of a start beside a timeline, in times the file."""
    return memory_for(count, lambda folder: Timeline(folder, "model").close())


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
    return cpu_seconds(lambda: evictions(kept, count - 1, RetainedSteps(frozenset(), 0.0), count + 2, None) and None)


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
    "timeline.jsonl, seconds of a run": (timeline, 2_000, 20_000, "bytes a second"),
    "goodput, seconds of a run": (goodput, 2_000, 20_000, "times the file"),
    "a start beside it, seconds": (start, 2_000, 20_000, "times the file"),
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
            f"{name:32s} {small} {first:.4f} {unit}, {large} {second:.4f} {unit}, exponent {exponent:.2f}", flush=True
        )


if __name__ == "__main__":
    main()
