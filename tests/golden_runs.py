"""The programs of the golden runs, which `dev/golden.py` lets each release run once, and later releases continue.

Each is a function `(directory, last_step) -> state`. What they train is small, because the checkpoints stay in the
repository. As a program: `python golden_runs.py NAME DIRECTORY LAST_STEP [PROCESS COUNT ADDRESS]`.
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jstep

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


def params():
    weights = np.linspace(-0.5, 0.5, 64, dtype=np.float32).reshape(8, 8)
    return {"w": jnp.asarray(weights, jnp.bfloat16), "b": jnp.zeros(8)}


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"].astype(x.dtype) + params["b"].astype(x.dtype)[None]) - x) ** 2)


def metric_fn(params, x):
    return {"loss": loss_fn(params, x)}


class Loader:
    """A loader whose position has a generator and an array whose axes are not in order in memory."""

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
    return jstep.skip_nonfinite(jstep.with_moving_average(inner, jstep.ExponentialMovingAverage(0.9)))


def everything(directory, last_step, **changes):
    """AdamW, compact, averages, a guard, a held rate, all hooks with a state, a loader with a position."""
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
            step, state, Loader(), last_step, hooks=hooks, checkpoint_dir=saver, config={"seed": 1}, **changes
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
    optimizer = jstep.stochastic_rounding(jstep.chain(jstep.add_noise(0.01, 0.5, key), jstep.adam(1e-2)), key)
    state = jstep.TrainState.create({**params(), "b": jnp.zeros(8, jnp.bfloat16)}, optimizer)
    batches = (X[i % 8 :: 8] for i in range(100))
    return jstep.train(jstep.minimize(loss_fn, optimizer), state, batches, last_step, checkpoint_dir=directory)


def lanes(directory, last_step):
    """Lanes, on any number of devices, stages, and masters."""
    optimizer = jstep.master_weights(jstep.lion(1e-3))
    steps = {0: jstep.minimize(loss_fn, optimizer, lanes=4), 5: jstep.minimize(loss_fn, optimizer, lanes=4)}
    state = jstep.TrainState.create(params(), optimizer)
    return jstep.train(steps, state, jstep.batches(X, 8, seed=3), last_step, checkpoint_dir=directory)


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


def branch(directory, last_step):
    """A branch of `everything`, beside it."""
    parent = directory.replace("branch", "everything")
    return everything(directory, last_step, start_from=f"{parent}/model-6")


def bucket(directory, last_step):
    """A run in a bucket."""
    optimizer = jstep.momentum(0.1, 0.9)
    state = jstep.TrainState.create(params(), optimizer)
    hooks = [jstep.FingerprintHook(every_n_steps=2, path=f"{directory}/fingerprints.jsonl"), jstep.History()]
    step = jstep.minimize(loss_fn, optimizer)
    with jstep.Saver(directory, max_to_keep=1) as saver:
        return jstep.train(step, state, jstep.batches(X, 8), last_step, hooks=hooks, checkpoint_dir=saver)


Program = Callable[[str, int], jstep.TrainState]
RUNS: dict[str, Program] = {
    program.__name__: program for program in (everything, from_loop, generator, lanes, processes, branch, bucket)
}
"""Name → program; each has steps up to 4 in its first start and up to 6 in its second, and a branch up to 8."""


def main(name, directory, last_step, process=None, count=None, address=None):
    if process is not None:
        jstep.distributed.initialize(address, int(count), int(process))
    RUNS[name](directory, int(last_step))


if __name__ == "__main__":
    main(*sys.argv[1:])
