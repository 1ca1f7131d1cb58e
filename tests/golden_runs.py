"""The programs of the golden runs, which `dev/golden.py` lets each release run once, and later
releases continue.

Each is a function `(directory, last_step) -> state`. What they train is small, because the
checkpoints stay in the repository. As a program: `python golden_runs.py NAME DIRECTORY LAST_STEP
[PROCESS COUNT ADDRESS]`.
"""

import collections
import os
import pathlib
import random
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jstep
from jstep.record.starts import read_starts
from jstep.stores.tagged_json import as_json, copy_encodable

IS_WRITTEN = "GOLDEN_SECS" in os.environ
"""Whether `dev/golden.py` writes the runs."""
X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


def params():
    weights = np.linspace(-0.5, 0.5, 64, dtype=np.float32).reshape(8, 8)
    return {"w": jnp.asarray(weights, jnp.bfloat16), "b": jnp.zeros(8)}


def loss_fn(params, x):
    return jnp.mean(
        (jnp.tanh(x @ params["w"].astype(x.dtype) + params["b"].astype(x.dtype)[None]) - x) ** 2
    )


def metric_fn(params, x):
    return {"loss": loss_fn(params, x)}


class Loader:
    """A loader whose position has a generator and an array whose axes are not in order in
    memory."""

    def __init__(self):
        self.rng = np.random.default_rng(1)
        self.order = np.arange(6).reshape(2, 3).T

    def __iter__(self):
        return self

    def __next__(self):
        self.order = (self.order + 1) % 6
        return X[(self.rng.integers(0, 64, 8) + self.order[1, 0]) % 64]

    def get_state(self):
        return {"rng": self.rng, "order": self.order, "name": ("golden", 1.5)}

    def set_state(self, value):
        self.rng, self.order = value["rng"], value["order"]


class Counter(jstep.Hook):
    """A hook of the user's, whose state has an array."""

    def __init__(self, key=None):
        self.key = key
        self.steps = np.zeros((2, 1), np.int64)

    def after_step(self, step, state, metrics):
        self.steps = self.steps + 1

    def get_state(self):
        return {"steps": self.steps, "key": jax.random.key(3)}

    def set_state(self, value):
        self.steps = value["steps"]


def everything_optimizer():
    inner = jstep.compact(jstep.adamw(jstep.held("rate", 1e-2)), min_size=64, block=32)
    return jstep.skip_nonfinite(
        jstep.with_moving_average(inner, jstep.ExponentialMovingAverage(0.9))
    )


def everything(directory, last_step, **changes):
    """AdamW, compact, averages, a guard, a held rate, all hooks with a state, a loader with a
    position."""
    optimizer = everything_optimizer()
    evaluate = jstep.evaluator(metric_fn, [X[:8]])
    hooks = [
        jstep.EvaluationHook(
            evaluate,
            every_n_steps=2,
            callbacks=[
                jstep.EarlyStopping("loss", patience=50),
                jstep.KeepBest(f"{directory}/best", "loss"),
                jstep.ReduceOnPlateau("loss", "rate", patience=50),
            ],
        ),
        jstep.EvaluationHook(
            evaluate,
            every_n_steps=3,
            prefix="keyed",
            key="mine",
            callbacks=[
                jstep.EarlyStopping("loss", patience=50, key="stop"),
                jstep.ReduceOnPlateau("loss", "rate", patience=50, key="plateau"),
            ],
        ),
        jstep.History(every_n_steps=1),
        jstep.History(f"{directory}/history.jsonl", every_n_steps=2),
        jstep.FingerprintHook(every_n_steps=2, path=f"{directory}/fingerprints.jsonl"),
        jstep.NanLossHook(max_skipped_steps=10),
        Counter(),
        Counter(key="counter"),
    ]
    step = jstep.minimize(loss_fn, optimizer)
    state = jstep.TrainState.create(params(), optimizer)
    with jstep.Saver(directory, max_to_keep=1) as saver:
        return jstep.train(
            step,
            state,
            Loader(),
            last_step,
            hooks=hooks,
            checkpoint_dir=saver,
            config={"seed": 1},
            **changes,
        )


def from_loop(directory, last_step):
    """A loop that makes its batches from a generator that the checkpoints have."""
    optimizer = jstep.muon(1e-2)
    rng = np.random.default_rng(2)
    weights = {"w": params()["w"].astype(jnp.float32)}
    state = jstep.TrainState.create(weights, optimizer, model_state={"mean": jnp.zeros(8)})
    step = jstep.minimize(lambda p, x: jnp.mean((x @ p["w"] - x) ** 2), optimizer)
    run = jstep.Run(step, state, jstep.from_loop(rng=rng), last_step, checkpoint_dir=directory)
    with run:
        for _ in run:
            run.train_step(X[rng.integers(0, 64, 8)])
    return run.state


def generator(directory, last_step):
    """Batches of a generator, whose position is a number; an optimizer that draws."""
    key = jax.random.key(4)
    optimizer = jstep.stochastic_rounding(
        jstep.chain(jstep.add_noise(0.01, 0.5, key), jstep.adam(1e-2)), key
    )
    state = jstep.TrainState.create({**params(), "b": jnp.zeros(8, jnp.bfloat16)}, optimizer)
    batches = (X[i % 8 :: 8] for i in range(100))
    return jstep.train(
        jstep.minimize(loss_fn, optimizer), state, batches, last_step, checkpoint_dir=directory
    )


def lanes(directory, last_step):
    """Lanes, on any number of devices, stages, and masters."""
    optimizer = jstep.master_weights(jstep.lion(1e-3))
    steps = {
        0: jstep.minimize(loss_fn, optimizer, lanes=4),
        5: jstep.minimize(loss_fn, optimizer, lanes=4),
    }
    state = jstep.TrainState.create(params(), optimizer)
    return jstep.train(
        steps, state, jstep.batches(X, 8, seed=3), last_step, checkpoint_dir=directory
    )


def processes(directory, last_step):
    """Parameters that are split over all devices: when it was written, of two processes."""
    optimizer = jstep.adamw(1e-2)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    state = jstep.shard_state(
        jstep.TrainState.create(params(), optimizer), mesh, [("w", jax.P("data")), ("*", jax.P())]
    )
    return jstep.train(
        jstep.minimize(loss_fn, optimizer),
        state,
        jstep.batches(X, 8, seed=5),
        last_step,
        checkpoint_dir=directory,
        batch_sharding="data",
    )


def odd_state():
    """A value with each tag that needs neither torch nor a file."""
    fields = [(("title", "a"), "u2"), ("b", [("c", ">i8")], (2, 1))]
    return {
        "bytes": b"\0x",
        "numbers": [10**2000, float("nan"), -0.0, np.float32(0.5), np.datetime64("2026-01-01")],
        "keys": {1: (2,), (3,): None},
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "arrays": [
            np.zeros(2, fields),
            np.ones((2, 3), ml_dtypes.int4).T,
            np.array(["a", "bc"]),
            np.zeros((0, 3)),
        ],
        "random": [
            np.random.default_rng(1),
            np.random.RandomState(2),
            random.Random(3),
            np.random.Philox(4),
        ],
        "seed": np.random.SeedSequence(5),
        "jax": [jnp.arange(3, dtype=jnp.bfloat16), jnp.asarray(2.0), jax.random.key(6, impl="rbg")],
    }


class Odd(jstep.Hook):
    """A hook whose state never changes, and is compared when it is restored."""

    def get_state(self):
        return odd_state()

    def set_state(self, value):
        assert as_json(copy_encodable(value)) == as_json(copy_encodable(odd_state()))


class Stops(jstep.Hook):
    """Stops a run where no save is planned, and replaces a leaf of the state before."""

    def __init__(self, last_step):
        self.last_step = last_step

    def after_step(self, step, state, metrics):
        if step == self.last_step - 1:
            return state.replace(
                model_state={**state.model_state, "mean": state.model_state["mean"] + 1.0}
            )
        return step == self.last_step


class Hangs(jstep.Hook):
    """When the run is written, hangs at its end until that is recorded as a stall, and then ends
    the process.

    So the newest checkpoint is the temporary one before the end, and the file of the stall stays.
    """

    def __init__(self, saver):
        self.saver = saver

    def end(self, step, state):
        if not IS_WRITTEN:
            return
        self.saver.wait()
        directory = pathlib.Path(self.saver.directory)
        while not read_starts(str(directory))["model"][-1]["stalls"] or not list(
            (directory / "stalls").glob("*.json")
        ):
            time.sleep(0.1)
        os._exit(0)


class SlowLoader(Loader):
    """A loader whose position takes so long to read that a run reads it only where a save is
    planned."""

    def get_state(self):
        time.sleep(0.2)
        return super().get_state()


def odd_values(directory, last_step):
    """What a checkpoint and a record seldom have: see `test_golden.py` for the list."""
    optimizer = jstep.adam(1e-2)
    weights = {**params(), "left": {"a/b": jnp.ones(2)}}
    model_state = {
        "mean": jnp.zeros(3),
        "carried": jnp.ones(3, jnp.uint4),
        "empty": jnp.zeros((0, 2)),
        "key": jax.random.key(7),
    }
    state = jstep.TrainState.create(weights, optimizer, model_state=model_state)
    evaluate = jstep.evaluator(
        lambda p, x: {"loss": loss_fn(p, x), "norm": jnp.sum(jnp.abs(p["w"].astype(jnp.float32)))},
        [X[:8]],
    )
    best = [
        jstep.KeepBest(f"{directory}/best", "loss"),
        jstep.KeepBest(f"{directory}/best", "norm", mode="max", prefix="norm"),
    ]
    with jstep.Saver(directory, max_to_keep=1, leave_out=["left/*"]) as saver:
        hooks = [
            jstep.EvaluationHook(evaluate, every_n_steps=2, callbacks=best),
            Odd(),
            Stops(last_step),
            Hangs(saver),
            jstep.StallHook(
                warn_secs=1.0 if IS_WRITTEN else 60.0, factor=1e-3 if IS_WRITTEN else 30.0
            ),
        ]
        step = jstep.minimize(loss_fn, optimizer)
        return jstep.train(step, state, SlowLoader(), 100, hooks=hooks, checkpoint_dir=saver)


class OwnLoader:
    """A loader whose position differs between the processes, and is so large that it is a file."""

    def __init__(self):
        self.rows = np.full(2**16 + 1, jax.process_index(), np.uint8)

    def __iter__(self):
        return self

    def __next__(self):
        self.rows[0] += 1
        return X[self.rows[0] % 8 :: 8][:4]

    def get_state(self):
        return {"rows": self.rows}

    def set_state(self, value):
        assert (value["rows"][1:] == jax.process_index()).all()
        self.rows = value["rows"]


def odd_processes(directory, last_step):
    """Positions of two processes; of one process, batches without a position."""
    optimizer = jstep.momentum(0.1, 0.9)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    state = jstep.shard_state(jstep.TrainState.create(params(), optimizer), mesh, [("*", jax.P())])
    step = jstep.minimize(loss_fn, optimizer)
    batches = OwnLoader() if jax.process_count() > 1 else jstep.batches(X, 8)
    with jstep.Saver(directory, max_to_keep=1) as saver:
        return jstep.train(
            step, state, batches, last_step, checkpoint_dir=saver, batch_sharding="data"
        )


def mixed(directory, last_step):
    """A mixture whose weights change, two steps a call, event files, and checkpoints that are kept
    for good."""
    optimizer = jstep.adam(1e-2)
    weights = {0: {"a": 3, "b": 1}, 3: {"a": 1, "b": 1}}
    batches = jstep.mixture({"a": X[:48], "b": X[48:]}, 8, weights, seed=1)
    state = jstep.TrainState.create(params(), optimizer)
    step = jstep.minimize(loss_fn, optimizer)
    with jstep.Saver(directory, max_to_keep=1, keep_checkpoint_every_n_hours=1e-6) as saver:
        return jstep.train(
            step,
            state,
            batches,
            last_step,
            checkpoint_dir=saver,
            save_checkpoint_steps=2,
            logdir=f"{directory}/logs",
            save_summaries_steps=2,
            steps_per_call=2,
        )


def branch(directory, last_step):
    """A branch of `everything`, beside it."""
    parent = directory.replace("branch", "everything")
    return everything(directory, last_step, start_from=f"{parent}/model-6")


def bucket(directory, last_step):
    """A run in a bucket."""
    optimizer = jstep.momentum(0.1, 0.9)
    state = jstep.TrainState.create(params(), optimizer)
    hooks = [
        jstep.FingerprintHook(every_n_steps=2, path=f"{directory}/fingerprints.jsonl"),
        jstep.History(),
    ]
    step = jstep.minimize(loss_fn, optimizer)
    with jstep.Saver(directory, max_to_keep=1) as saver:
        return jstep.train(
            step, state, jstep.batches(X, 8), last_step, hooks=hooks, checkpoint_dir=saver
        )


Program = Callable[[str, int], jstep.TrainState]
RUNS: dict[str, Program] = {
    program.__name__: program
    for program in (
        everything,
        from_loop,
        generator,
        lanes,
        processes,
        odd_values,
        odd_processes,
        mixed,
        branch,
        bucket,
    )
}
"""Name → program; each has steps up to 4 in its first start and up to 6 in its second, and a branch
up to 8."""


def main(name, directory, last_step, process=None, count=None, address=None):
    if process is not None:
        jstep.distributed.initialize(address, int(count), int(process))
    RUNS[name](directory, int(last_step))


if __name__ == "__main__":
    main(*sys.argv[1:])
