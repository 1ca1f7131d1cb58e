"""The programs that power cuts interrupt: saves, a training run with everything on, a resumed one,
and weights.

A recorded program runs `main`; the tests call the same functions for what each state has to restore
to.
"""

import functools
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import file_calls
import jax
import jax.numpy as jnp
import numpy as np
from file_calls import mark

import jstep

ACKNOWLEDGED = "acknowledged "
"""Begin of the mark of a save after `wait` returned: the number of the save, or the step of a
run."""


def bits(tree):
    """Return all bits of a tree."""
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


class Saves(NamedTuple):
    """Saves of one Saver: the step of each, in order, and the Saver's options."""

    steps: Sequence[int]
    options: Mapping[str, Any]


SAVES = {
    "keep 2": Saves((1, 2, 3, 4), {"max_to_keep": 2}),
    "keep 1": Saves((1, 2, 3, 4), {"max_to_keep": 1}),
    "a step again": Saves((1, 2, 3, 3, 4), {"max_to_keep": 2}),
}


def saved_state(step, number):
    """Return the state of a save; each number has its own values."""
    rows = np.arange(200, dtype=np.float32) + 1000 * (number + 1)
    made = {"global_step": np.int32(step), "params": {"w": rows, "b": np.full(3, number, np.int32)}}
    return jax.tree.map(jnp.asarray, made)


def checkpoints(folder):
    """Return the directory of the checkpoints, two levels below a folder that exists."""
    return os.path.join(folder, "runs", "a")


def save(folder, saves, first=0):
    """Save each step, and mark when it is acknowledged; from the number `first` on."""
    with jstep.Saver(checkpoints(folder), **saves.options) as saver:
        for number, step in list(enumerate(saves.steps))[first:]:
            saver.save(saved_state(step, number))
            saver.wait()
            mark(f"{ACKNOWLEDGED}{number}")


LAST = 8
EVERY = 2
"""Steps between checkpoints and between evaluations."""
LOSSES = {2: 0.1, 4: 0.7, 6: 0.05, 8: 0.5}
"""What evaluations return."""
KEPT_BEST = 2
"""Number of best checkpoints; the second of all is evicted by the third."""


class _Task(NamedTuple):
    """A small problem: the optimizer, the data and the compiled step."""

    optimizer: Any
    data: Any
    step: Any


@functools.cache
def _task():
    """Return the problem; the programs that only save do not need it."""

    def loss_fn(params, x, rng):
        return jnp.mean((x @ params["w"] - 1.0) ** 2) + jnp.sum(
            jax.random.normal(rng, (2,)) * params["w"]
        )

    optimizer = jstep.momentum(jstep.exponential_decay(0.1, 10, 0.9), 0.9)
    data = jstep.batches(np.arange(32, dtype=np.float32).reshape(16, 2) / 32, 4, seed=3)
    return _Task(optimizer, data, jstep.minimize(loss_fn, optimizer, rng=jax.random.key(7)))


def new_state():
    """Return the state that a run begins with."""
    return jstep.TrainState.create({"w": jnp.ones(2)}, _task().optimizer)


@functools.cache
def states_of_run():
    """Return the bits of the state after each step of a run without a stop."""
    state, found = new_state(), {}
    for step in range(LAST):
        state, _ = _task().step(state, _task().data[step])
        found[step + 1] = bits(state)
    return found


def _acknowledging(saver, tell):
    """Return a hook that tells the newest complete checkpoint, one step after it was begun."""

    def look(step, state, metrics):
        if step % EVERY == 1 and step > EVERY:
            saver.wait()
            tell(f"{ACKNOWLEDGED}{saver.latest_step()}")

    return jstep.every(1, look)


def train(folder, last=LAST, tell=mark, hooks=(), **options):
    """Run with everything on: checkpoints, the best one, summaries, times and fingerprints."""
    run = checkpoints(folder)
    best = jstep.KeepBest(os.path.join(folder, "best"), "loss", max_to_keep=KEPT_BEST)

    def evaluate(state):
        return {"loss": LOSSES.get(jstep.global_step(state), 1.0)}

    with jstep.Saver(run, max_to_keep=2) as saver:
        state = jstep.train(
            _task().step,
            new_state(),
            _task().data,
            last,
            hooks=[
                *hooks,
                jstep.EvaluationHook(evaluate, every_n_steps=EVERY, callbacks=[best]),
                jstep.FingerprintHook(every_n_steps=1),
                _acknowledging(saver, tell),
            ],
            checkpoint_dir=saver,
            save_checkpoint_steps=EVERY,
            logdir=os.path.join(folder, "logs"),
            save_summaries_steps=1,
            progress=False,
            **options,
        )
        saver.wait()
        tell(f"{ACKNOWLEDGED}{saver.latest_step()}")
    return state


def digest(folder, state):
    """Return the step, and a digest of the state and of the best checkpoints of a run."""
    whole = hashlib.sha256(bits(state))
    with jstep.Saver(os.path.join(folder, "best"), prefix="best") as saver:
        for step in saver.all_steps():
            whole.update(b"%d" % step + bits(saver.restore(new_state(), step)))
    return f"{jstep.global_step(state)} {whole.hexdigest()}"


WEIGHTS = {"one file": (10**9,) * 3, "shards": (900, 900, 1700, 10**9, 900)}
"""The max_shard_bytes of each save."""


def weights(number):
    """Return the weights of a save."""
    return {name: jnp.full(200, 10.0 * number + i, jnp.float32) for i, name in enumerate("abc")}


def path_of_weights(folder):
    """Return the path that weights are saved to."""
    return os.path.join(folder, "weights", "model.safetensors")


def save_weights(folder, limits):
    """Save weights several times to the same path."""
    for number, limit in enumerate(limits):
        jstep.save_weights(path_of_weights(folder), weights(number), max_shard_bytes=limit)
        mark(f"{ACKNOWLEDGED}{number}")


def resumed(folder):
    """Run twice, the second time from the checkpoint of the first."""
    train(folder, LAST // 2)
    train(folder)


RUNS = {
    **{f"saver, {name}": functools.partial(save, saves=saves) for name, saves in SAVES.items()},
    "train": train,
    "train, resumed": resumed,
    **{
        f"weights, {name}": functools.partial(save_weights, limits=limits)
        for name, limits in WEIGHTS.items()
    },
}


def main(name, folder, log):
    """Run a program by name and record it. All modules are loaded first, and programs compiled."""
    with file_calls.recording(folder, log):
        mark("start")
        RUNS[name](folder)


def again(folder, begins, name):
    """Continue interrupted saves after those acknowledged, and record those of `disk0` to `log0`,
    and so on."""
    for number, first in enumerate(begins):
        with file_calls.recording(f"{folder}/disk{number}", f"{folder}/log{number}"):
            mark("start")
            if first:
                mark(f"{ACKNOWLEDGED}{first - 1}")
            save(f"{folder}/disk{number}", SAVES[name], first)


if __name__ == "__main__":
    main(*sys.argv[1:])
