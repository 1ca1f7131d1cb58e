"""A program with all its types, as a user writes it, which type checkers read; it is not run.

A line that must be an error ends with `# E`. No other line may be one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import jstep


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Params:
    """Parameters."""

    w: jax.Array
    b: jax.Array


class Batch(NamedTuple):
    """A batch."""

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.float32]


def loss_fn(params: Params, batch: Batch) -> jax.Array:
    """Return the loss."""
    return jnp.mean((batch.x @ params.w + params.b - batch.y) ** 2)


def loss_with_aux(params: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss and another metric."""
    loss = loss_fn(params, batch)
    return loss, {"twice": 2 * loss}


def create() -> Params:
    """Return parameters."""
    key = jax.random.key(0)
    return Params(jax.random.normal(key, (3, 1)), jax.random.normal(key, (1,)))


# Schedules, optimizers, steps.

schedule = jstep.warmup_cosine_decay(1e-3, warmup_steps=10, decay_steps=100)
as_schedule: jstep.Schedule = schedule
print(float(schedule(3)))
optimizer = jstep.adamw(schedule, weight_decay=0.1)
assert_type(optimizer, jstep.Optimizer)
clipped = jstep.clip_gradients(by_global_norm=1.0)
assert_type(
    jstep.chain(clipped, jstep.scale_by_adam(), jstep.scale_by_learning_rate(as_schedule)),
    jstep.Optimizer,
)
averaged = jstep.with_moving_average(
    jstep.cautious(jstep.muon(1e-2)), jstep.ExponentialMovingAverage(0.99)
)
assert_type(jstep.compact(jstep.scope(averaged, "a")), jstep.Optimizer)
train_step = jstep.minimize(loss_fn, optimizer)
assert_type(train_step, jstep.TrainStep)
assert_type(
    jstep.minimize(
        loss_with_aux, optimizer, has_aux=True, metrics=("grad_norm",), rng=jax.random.key(0)
    ),
    jstep.TrainStep,
)
pure_step: Callable[..., Any] = jstep.minimize(loss_fn, optimizer, jit=False)
train_step.lower(jstep.TrainState.create(create(), optimizer), 3)
train_step.clear_cache()
print(train_step.donate)


@jstep.TrainStep
def custom(
    state: jstep.TrainState[Params], batch: Batch
) -> tuple[jstep.TrainState[Params], dict[str, jax.Array]]:
    """Run one step of a user's own."""
    value, grads = jstep.compute_gradients(loss_fn)(state.params, batch)
    return jstep.apply_gradients(state, grads, optimizer), {"loss": value}


assert_type(custom, jstep.TrainStep)
assert_type(jstep.scan_steps(train_step), jstep.TrainStep)


def pure(
    state: jstep.TrainState[Params], batch: Batch
) -> tuple[jstep.TrainState[Params], dict[str, jax.Array]]:
    """Run one step that is not compiled."""
    return custom(state, batch)


scanned = jstep.scan_steps(pure)(jstep.TrainState.create(create(), optimizer), 3)
assert_type(scanned, tuple[jstep.TrainState[Params], dict[str, jax.Array]])

# Gradients and clips.

example = Batch(np.ones((1, 3), np.float32), np.ones((1, 1), np.float32))
assert_type(jstep.compute_gradients(loss_fn)(create(), example), tuple[jax.Array, Params])
with_aux = jstep.compute_gradients(loss_with_aux, has_aux=True)
assert_type(with_aux(create(), example), tuple[tuple[jax.Array, dict[str, jax.Array]], Params])
assert_type(jstep.clip_by_value(create(), -1.0, 1.0), Params)
assert_type(jstep.clip_by_norm(create().w, 1.0), jax.Array)
assert_type(jstep.clip_by_average_norm(create(), 1.0), Params)
assert_type(jstep.clip_by_global_norm(create(), 1.0), tuple[Params, jax.Array])
assert_type(jstep.global_norm(create()), jax.Array)

# States.

untyped: jstep.TrainState = jstep.TrainState.create(create(), optimizer)
state = jstep.TrainState.create(create, optimizer)
assert_type(state, jstep.TrainState[Params])
assert_type(jstep.TrainState.create(create(), optimizer).params, Params)
assert_type(state.params.w, jax.Array)
assert_type(state.global_step, jax.Array)
print(int(state.global_step), state.global_step + 1, jstep.global_step(state))
assert_type(state.replace(params=create()), jstep.TrainState[Params])
assert_type(state.with_params(create()), jstep.TrainState[Params])
assert_type(jstep.averaged_params(state), Params)
assert_type(jstep.fingerprint(state), jax.Array)
assert_type(jstep.fingerprint(state, per_leaf=True), dict[str, jax.Array])
assert_type(jstep.increment_global_step(state), jstep.TrainState[Params])
assert_type(jstep.get_slot(state, "m"), Params | None)
assert_type(jstep.get_slot(state, "m", "w"), jax.Array | None)

# Batches.

rows = np.ones((100, 3), np.float32)
data = jstep.batches(Batch(rows, rows[:, :1]), batch_size=10, seed=0)
assert_type(data[0], Batch)
assert_type(data[1:3][0], Batch)
assert_type(next(iter(data)), Batch)
assert_type(len(data), int)
assert_type(jstep.batches([Batch(rows[0], rows[0])], 10)[0], Batch)
assert_type(jstep.mixture({"a": Batch(rows, rows)}, 8, {"a": 1.0})[0], Batch)

state, metrics = train_step(state, data[0])
assert_type(state, jstep.TrainState[Params])
loss: float = float(metrics["loss"])

# Runs.


class Counter(jstep.Hook):
    """A hook."""

    def __init__(self) -> None:
        self.n = 0

    def after_step(self, step: int, state: jstep.TrainState, metrics: Any) -> bool:
        """Count."""
        self.n += 1
        return self.n > 10


class Printer(jstep.ReportingHook):
    """A hook that reports."""

    def deliver(self, step: int, values: dict[str, Any]) -> None:
        """Print a row."""
        print(step, values["loss"])


def metric_fn(params: Params, batch: Batch) -> dict[str, jax.Array]:
    """Return metrics."""
    return {"loss": loss_fn(params, batch)}


def generator() -> Iterator[Batch]:
    """Yield batches."""
    for i in range(10):
        yield data[i]


def on_row(step: int, values: dict[str, float]) -> None:
    """Print a row."""
    print(step, values["loss"])


evaluate = jstep.evaluator(metric_fn, [data[0]])
assert_type(evaluate(state), dict[str, float])
evaluation = jstep.EvaluationHook(
    evaluate, every_n_steps=10, callbacks=[jstep.EarlyStopping("loss", patience=3)]
)
every = jstep.every(10, lambda step, state, metrics: print(step, float(metrics["loss"])))
state = jstep.train(
    train_step,
    state,
    data,
    100,
    hooks=[
        evaluation,
        jstep.MetricsHook(on_row),
        every,
        jstep.NanLossHook(),
        Counter(),
        Printer(every_n_steps=3),
    ],
    checkpoint_dir="run",
)
assert_type(state, jstep.TrainState[Params])
state = jstep.train(
    {0: train_step, 50: custom}, state, generator(), last_step=100, steps_per_call="auto"
)
assert_type(
    jstep.train(train_step, state, lambda step: data[step], None, stop_secs=3).params, Params
)

with jstep.Run(train_step, state, data, last_step=100, hooks=[evaluation]) as run:
    assert_type(run, jstep.Run[Params])
    for step in run:
        assert_type(step, int)
        assert_type(run.state, jstep.TrainState[Params])
        print(run.metrics["loss"])

# Checkpoints and weights.

with jstep.Saver("run", max_to_keep=3) as saver:
    assert_type(saver.save(state, extra={"note": "mine"}), str)
    assert_type(saver.restore(state), jstep.TrainState[Params])
    assert_type(saver.restore_params(state.params), Params)
    assert_type(saver.all_steps(), list[int])
    assert_type(saver.restore(), dict[str, Any])
assert_type(jstep.load_weights("w.safetensors", state.params), Params)
assert_type(jstep.latest_checkpoint("run"), str | None)
assert_type(jstep.plan(optimizer, 100), jstep.Plan)
assert_type(jstep.cost(train_step, state, data[0]).flops, float | None)

# What must be errors.

jstep.adamw("fast")  # E
jstep.adamw(learning_rat=1e-3)  # E
jstep.train(loss_fn, state, data, 100)  # E
jstep.train(train_step, state, data, "100")  # E
jstep.train(train_step, create(), data, 100)  # E
jstep.train(train_step, state, data, 100, checkpointdir="x")  # E
jstep.minimize(loss_fn, 1e-3)  # E
jstep.minimize(optimizer, loss_fn)  # E
train_step(create(), data[0])  # E
jstep.TrainState.create(optimizer, create())  # E
jstep.batches(rows, batch_size="a")  # E
jstep.batches(rows, 8, 0, True)  # E
jstep.muon(1e-2, 0.95, True)  # E
jstep.scope("fast", optimizer)  # E
jstep.update_every(4, optimizer)  # E
jstep.compute_gradients(loss_fn)(example, example)  # E
jstep.Run(train_step, create(), data, 100)  # E
train_step(state)[0].slot  # E
jstep.EarlyStopping(3)  # E
jstep.Saver(3)  # E
print(state.parms)  # E
print(state.params.weight)  # E
jstep.adamm(1e-3)  # E

try:
    state = jstep.train(train_step, state, [data[0]], 1)
except jstep.Preempted as error:
    state = error.state
