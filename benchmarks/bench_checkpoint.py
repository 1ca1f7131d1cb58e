"""Saver and Orbax's CheckpointManager with states of three sizes: save, restore, and how long the
loop waits.

    python benchmarks/bench_checkpoint.py [rounds] [megabytes] [trained|fresh|zeros]

The manager saves in the background, which is its default. It is there twice, with the handler that
its guides show (StandardSave), and with what its documentation recommends for speed: PyTreeSave
with Zarr 3 in OCDBT, whose chunks are compressed faster, restored with the shardings of the arrays.
Saver is compared with both.

Each round runs every contender, in shuffled order. Prints medians and minima, also of the CPU time
of all threads, which other processes disturb less:
  stall     save() and the three donated steps after it
  save      save() and wait()
  restore   with the same sharding; that of Saver verifies every byte, that of the manager none
The ratios to the manager are medians of the ratios of the rounds.

The state of 256 MB is measured in 300 arrays in the temporary folder (or $BENCH_DIR), and in 16
arrays in memory (/dev/shm); those of a sixteenth and of a quarter of its bytes are in 30 and 100
arrays. The manager takes most of its time for each array, and Saver most of it for each byte.
"""

import itertools
import os
import random
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
from jstep.checkpoint.saver import Saver

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 7
BYTES = int(float(sys.argv[2]) * 1e6) if len(sys.argv) > 2 else 256_000_000
DATA = sys.argv[3] if len(sys.argv) > 3 else "trained"
BOUNDS = {"stall": 0.9, "save": 0.6, "restore": 0.8}
"""Ratios of Saver to the manager to stay below."""
IN_MEMORY = "/dev/shm"
PEERS = ("orbax manager", "orbax manager, zarr3")


def make_state(leaves, total):
    size = total // 4 // 2 // leaves  # params and one slot
    keys = jax.random.split(jax.random.key(0), leaves)
    params = {
        f"layer{i}": {"kernel": jax.random.normal(key, (size,))} for i, key in enumerate(keys)
    }
    # A fresh state is half random, half zeros.
    state = jstep.TrainState.create(params, jstep.momentum(1e-3, 0.9))
    slots = {"momentum": params} if DATA == "trained" else state.slots
    params = jax.tree.map(jnp.zeros_like, params) if DATA == "zeros" else params
    return state.replace(params=params, slots=jax.tree.map(jnp.copy, slots))


class Manager:
    """Orbax's CheckpointManager with common options."""

    def __init__(self, directory):
        self.manager = ocp.CheckpointManager(
            directory, options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )

    def save(self, state):
        self.manager.save(int(state.global_step), args=ocp.args.StandardSave(state))

    def wait(self):
        self.manager.wait_until_finished()

    def restore(self, shapes):
        return self.manager.restore(
            self.manager.latest_step(), args=ocp.args.StandardRestore(shapes)
        )


class Zarr3Manager(Manager):
    """The manager with PyTreeSave and Zarr 3."""

    def __init__(self, directory):
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
        self.manager = ocp.CheckpointManager(directory, options=options, item_handlers=handler)

    def save(self, state):
        self.manager.save(int(state.global_step), args=ocp.args.PyTreeSave(state))

    def restore(self, shapes):
        args = ocp.args.PyTreeRestore(
            shapes, restore_args=ocp.checkpoint_utils.construct_restore_args(shapes)
        )
        return self.manager.restore(self.manager.latest_step(), args=args)


class Ours:
    def __init__(self, directory, **options):
        self.saver = Saver(directory, max_to_keep=2, **options)
        self.save, self.wait, self.restore = self.saver.save, self.saver.wait, self.saver.restore


def timed(phases, name, work):
    """Run work, and record its seconds and its CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    phases[name] = time.perf_counter() - wall
    phases[f"{name}, CPU"] = time.process_time() - cpu
    return result


def measure(contender, state, step):
    phases = {}

    def save_and_continue():
        contender.save(state)
        following = state
        for _ in range(3):
            following = step(following)
        return jax.block_until_ready(following)

    def save_and_wait():
        contender.save(state)
        contender.wait()

    jax.block_until_ready(state)
    state = timed(phases, "stall", save_and_continue)
    contender.wait()
    timed(phases, "save", save_and_wait)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    timed(phases, "restore", lambda: jax.block_until_ready(contender.restore(shapes)))
    return state, phases


def rounds_of(leaves, folder, total=BYTES):
    """Return the phases of each round by contender, for a state of so many parameters and bytes."""
    directory = tempfile.mkdtemp(prefix="bench_checkpoint", dir=folder)
    contenders = {
        "orbax manager": Manager(os.path.join(directory, "manager")),
        "orbax manager, zarr3": Zarr3Manager(os.path.join(directory, "zarr3")),
        "Saver": Ours(os.path.join(directory, "saver")),
    }
    step = jax.jit(
        lambda state: jax.tree.map(lambda x: x + 1 if x.ndim == 0 else x * 0.999, state),
        donate_argnums=0,
    )
    state = step(make_state(leaves, total))
    times = {name: [] for name in contenders}
    names, shuffled = list(contenders), random.Random(0)
    try:
        for number in range(ROUNDS + 1):  # the first round is a warm-up
            shuffled.shuffle(names)
            for name in names:
                state, found = measure(contenders[name], state, step)
                if number:
                    times[name].append(found)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return times


def report_rounds(times, where, bounds, total=BYTES):
    """Print all phases, and the ratios to the manager; return whether the bounds hold."""
    for phase in times["Saver"][0]:
        peer = [found[phase] for found in times["orbax manager"]]
        for name, rounds in times.items():
            own = [found[phase] for found in rounds]
            median, best = statistics.median(own), min(own)
            print(
                f"{phase:13} {name:21} median {median * 1e3:7.1f} ms ({ratio(own, peer):5.2f})"
                f"   best {best * 1e3:7.1f} ms ({best / min(peer):5.2f})"
            )
    good = True
    for phase, bound in bounds.items():
        print(f"\n{phase[0].upper()}{phase[1:]} of a state of {total / 1e6:.0f} MB in {where}")
        for name, peer in itertools.product((name for name in times if name not in PEERS), PEERS):
            own, others = ([found[phase] for found in times[one]] for one in (name, peer))
            good &= report_ratio(name, peer, ratio(own, others), bound if name == "Saver" else None)
    return good


def main():
    good, folder = True, os.environ.get("BENCH_DIR")
    for leaves, total in ((15, BYTES // 16), (50, BYTES // 4), (150, BYTES)):
        good &= report_rounds(
            rounds_of(leaves, folder, total), f"{2 * leaves} arrays", BOUNDS, total
        )
    if os.path.isdir(IN_MEMORY):
        restore = {"restore": BOUNDS["restore"]}
        good &= report_rounds(rounds_of(8, IN_MEMORY), "16 arrays, files in memory", restore)
    return good


def ratio(own, peer):
    return statistics.median(a / b for a, b in zip(own, peer, strict=True))


if __name__ == "__main__":
    sys.exit(not main())
