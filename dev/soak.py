"""Soak test: memory, threads and file descriptors do not grow over many steps with all features.

    python dev/soak.py [steps]

It runs 20 000 steps by default, which takes less than a minute; part of the nightly run. Prints a
line for each part of the run and exits with 1 if something grew.
"""

import gc
import logging
import math
import os
import sys
import tempfile
import threading

import jax
import jax.numpy as jnp
import numpy as np

import jstep

PARTS = 10
COUNTS = 20
"""The number of measurements in each part."""


def resident():
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured():
    """Return what must not grow: the numbers of live arrays, threads, file descriptors and objects,
    and bytes."""
    gc.collect()
    return {
        "arrays": len(jax.live_arrays()),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
        "bytes": resident(),
    }


def soak(steps, directory):
    """Run with hooks, means, NaN checks, checkpoints, evaluations and event files; return state and
    measurements."""
    optimizer = jstep.skip_nonfinite(jstep.adam(jstep.held("learning_rate", 1e-3)))

    def loss_fn(params, x):
        error = x @ params["w"]
        return jnp.mean(error**2), {"largest": jnp.max(jnp.abs(error)), "rows": error}

    data = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
    data[7] = math.nan  # some updates are skipped
    train_step = jstep.minimize(loss_fn, optimizer, has_aux=True)
    held_out = jstep.batches(data[100:200], 32, num_epochs=1, shuffle=False, drop_remainder=False)
    found, rows = [], []
    evaluate = jstep.evaluator(lambda params, x: {"loss": jnp.square(x @ params["w"])}, held_out)
    part = steps // PARTS
    state = jstep.TrainState.create({"w": jnp.ones(16)}, optimizer)
    return jstep.train(
        train_step,
        state,
        jstep.batches(data, 8, seed=1),
        steps,
        hooks=[
            jstep.NanLossHook(every_n_steps=10, max_skipped_steps=100),
            jstep.MetricsHook(
                lambda step, values: rows.append(step), every_n_steps=part, mean=True
            ),
            jstep.LoggingHook(every_n_steps=50, mean=True),
            jstep.SummarySaverHook(save_steps=100, histograms="params/*", mean=True),
            jstep.FingerprintHook(
                every_n_steps=100, path=os.path.join(directory, "fingerprints.jsonl")
            ),
            jstep.EvaluationHook(
                evaluate,
                every_n_steps=max(part // 4, 1),
                callbacks=[
                    jstep.KeepBest(os.path.join(directory, "best"), "loss"),
                    jstep.ReduceOnPlateau("loss", "learning_rate", patience=50),
                    jstep.EarlyStopping("loss", patience=10**6),
                ],
            ),
            jstep.every(
                max(part // COUNTS, 1), lambda step, state, metrics: found.append(measured())
            ),
        ],
        checkpoint_dir=os.path.join(directory, "checkpoints"),
        save_checkpoint_steps=max(part // 2, 1),
        logdir=os.path.join(directory, "logs"),
        steps_per_call=1,
    ), found


def least_by_part(found):
    """Return the least of each measurement in each part of the run.

    Arrays in flight, not yet added or not yet collected come on top of those that are kept, and are
    more at one step than at another: what is kept shows in the least of many counts.
    """
    size = len(found) // PARTS
    parts = [found[i * size : (i + 1) * size] for i in range(PARTS)]
    return [{name: min(one[name] for one in part) for name in part[0]} for part in parts]


def growth(parts):
    """Return the measurements that grew between the middle and the end of the run, by name."""
    early = parts[len(parts) // 2 - 1]
    late = parts[-1]
    tolerance = {"arrays": 8, "threads": 2, "descriptors": 6, "objects": 5000, "bytes": 32 * 2**20}
    return {
        name: (early[name], late[name])
        for name in tolerance
        if late[name] > early[name] + tolerance[name]
    }


def main(steps=20_000):
    """Run, print the measurements, and return whether none of them grew."""
    logger = logging.getLogger("jstep")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    with tempfile.TemporaryDirectory() as directory:
        state, found = soak(steps, directory)
    parts = least_by_part(found)
    for i, one in enumerate(parts, 1):
        print(
            f"step {i * (steps // PARTS)}: "
            + ", ".join(f"{name} {value}" for name, value in one.items())
        )
    grown = growth(parts)
    if grown:
        print("grew: " + ", ".join(map(str, grown.items())))
    else:
        print(f"flat after {jstep.global_step(state)} steps")
    return not grown


if __name__ == "__main__":
    sys.exit(not main(*map(int, sys.argv[1:])))
