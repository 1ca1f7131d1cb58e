"""Saver and orbax's CheckpointManager with a state of 268 MB: save, restore, and the time that the loop is blocked.

    python tests/benchmarks/bench_checkpoint.py [rounds] [megabytes] [trained|fresh|zeros]

Each round runs every contender in turn. Prints medians and minima, and their ratios to those of the manager:
  stall     save() and the three donated steps after it
  save      save() and wait()
  restore   with the same sharding
"""

import os
import shutil
import statistics
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from _timing import report_ratio

import jstep
from jstep.checkpoint import Saver

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 7
BYTES = int(float(sys.argv[2]) * 1e6) if len(sys.argv) > 2 else 268_000_000
DATA = sys.argv[3] if len(sys.argv) > 3 else "trained"
LEAVES = 24


def make_state():
    size = BYTES // 4 // 2 // LEAVES  # params and one slot
    keys = jax.random.split(jax.random.key(0), LEAVES)
    params = {f"layer{i}": {"kernel": jax.random.normal(key, (size,))} for i, key in enumerate(keys)}
    state = jstep.TrainState.create(params, jstep.momentum(1e-3, 0.9))  # a fresh state is half random, half zeros
    slots = {"momentum": params} if DATA == "trained" else state.slots
    params = jax.tree.map(jnp.zeros_like, params) if DATA == "zeros" else params
    return state.replace(params=params, slots=jax.tree.map(jnp.copy, slots))


class Manager:
    """Orbax's CheckpointManager with common options."""

    def __init__(self, directory):
        self.manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def save(self, state):
        self.manager.save(int(state.global_step), args=ocp.args.StandardSave(state))

    def wait(self):
        self.manager.wait_until_finished()

    def restore(self, shapes):
        return self.manager.restore(self.manager.latest_step(), args=ocp.args.StandardRestore(shapes))


class Ours:
    def __init__(self, directory, **options):
        self.saver = Saver(directory, max_to_keep=2, **options)
        self.save, self.wait, self.restore = self.saver.save, self.saver.wait, self.saver.restore


def measure(contender, state, step):
    jax.block_until_ready(state)
    start = time.perf_counter()
    contender.save(state)
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    stall = time.perf_counter() - start
    contender.wait()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    start = time.perf_counter()
    contender.save(state)
    contender.wait()
    save = time.perf_counter() - start
    start = time.perf_counter()
    restored = jax.block_until_ready(contender.restore(shapes))
    restore = time.perf_counter() - start
    del restored
    return state, {"stall": stall, "save": save, "restore": restore}


def main():
    directory = tempfile.mkdtemp(prefix="bench_checkpoint", dir=os.environ.get("BENCH_DIR"))
    contenders = {
        "orbax manager": Manager(os.path.join(directory, "manager")),
        "Saver": Ours(os.path.join(directory, "saver")),
        "Saver(stage=True)": Ours(os.path.join(directory, "stage"), stage=True),
        "Saver(compress=True)": Ours(os.path.join(directory, "compress"), compress=True),
    }
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1 if x.ndim == 0 else x * 0.999, state), donate_argnums=0)
    state = step(make_state())
    times = {name: [] for name in contenders}
    try:
        for number in range(ROUNDS + 1):  # the first round is a warm-up
            for name, contender in contenders.items():
                state, found = measure(contender, state, step)
                if number:
                    times[name].append(found)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for phase in ("stall", "save", "restore"):
        peer = [found[phase] for found in times["orbax manager"]]
        for name, rounds in times.items():
            own = [found[phase] for found in rounds]
            median, best = statistics.median(own), min(own)
            print(
                f"{phase:8} {name:21} median {median * 1e3:7.1f} ms ({median / statistics.median(peer):5.2f})"
                f"   best {best * 1e3:7.1f} ms ({best / min(peer):5.2f})"
            )
    for phase in ("stall", "save", "restore"):
        print(f"\n{phase[0].upper()}{phase[1:]} of a state of {BYTES / 1e6:.0f} MB")
        for name in (name for name in times if name != "orbax manager"):
            pairs = zip(times[name], times["orbax manager"], strict=True)
            report_ratio(name, "orbax manager", statistics.median(own[phase] / peer[phase] for own, peer in pairs))


if __name__ == "__main__":
    main()
