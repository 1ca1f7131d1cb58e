"""Losses and metrics of any kind, in hooks: mappings, complex numbers, several losses; skips that
the state shows."""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jstep

BAD_STEP = 3


class FrozenDict(collections.abc.Mapping):
    """A mapping that is neither a dict nor a pytree."""

    def __init__(self, values):
        self._values = dict(values)

    def __getitem__(self, name):
        return self._values[name]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)


MAPPINGS = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "default": lambda values: collections.defaultdict(float, values),
    "frozen": FrozenDict,
    "proxy": types.MappingProxyType,
}
LOSSES = {
    "dict": lambda loss, bad: {"world": loss, "actor": bad},
    "nested": lambda loss, bad: {"world": {"kl": bad, "rec": loss}, "actor": loss},
    "ordered": lambda loss, bad: collections.OrderedDict(a=loss, b=bad),
    "real part": lambda loss, bad: jax.lax.complex(bad, loss),
    "imaginary part": lambda loss, bad: jax.lax.complex(loss, bad),
    "complex vector": lambda loss, bad: jnp.stack(
        [jax.lax.complex(loss, loss), jax.lax.complex(loss, bad)]
    ),
    "dict of vectors": lambda loss, bad: {
        "a": jnp.stack([loss, loss]),
        "b": jnp.stack([loss, bad]),
    },
    "tuple": lambda loss, bad: (loss, bad),
    "integer and vector": lambda loss, bad: {"a": jnp.int32(1), "b": jnp.stack([bad, loss])},
}


def step_of(make_loss, as_metrics=dict, optimizer=None, is_traced=True):
    """Return a custom step whose loss is NaN at BAD_STEP, and its optimizer."""
    optimizer = optimizer or jstep.gradient_descent(0.1)
    update = jstep.minimize(
        lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer, jit=False
    )

    def step(state, x):
        state, metrics = update(state, x)
        bad = jnp.where(state.global_step == BAD_STEP, jnp.nan, metrics["loss"])
        return state, as_metrics(
            {"loss": make_loss(metrics["loss"], bad), "other": metrics["loss"]}
        )

    return jstep.TrainStep(step) if is_traced else step


def train(
    step, hooks, last_step=8, optimizer=None, batches=lambda n: np.ones(3, np.float32), **options
):
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer or jstep.gradient_descent(0.1))
    return jstep.train(
        step, state, batches, last_step, hooks=hooks, log_steps=None, progress=False, **options
    )


@pytest.mark.thorough(
    except_for=["dict-4", "nested-1", "imaginary part-1", "imaginary part-4", "tuple-4"]
)
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("kind", LOSSES)
def test_each_leaf_and_each_part_of_a_loss_is_checked(kind, steps_per_call):
    hooks = [jstep.NanLossHook(every_n_steps=2)]
    with pytest.raises(
        jstep.NanLossDuringTrainingError, match="the loss is nan at step 3"
    ) as caught:
        train(step_of(LOSSES[kind]), hooks, steps_per_call=steps_per_call)
    assert caught.value.step == BAD_STEP
    train(step_of(lambda loss, bad: LOSSES[kind](loss, loss)), hooks, steps_per_call=steps_per_call)


@pytest.mark.parametrize("kind", ["dict", "imaginary part", "complex vector", "tuple"])
def test_losses_of_a_step_that_is_not_compiled_are_checked(kind):
    for convert in (lambda loss: loss, lambda loss: jax.tree.map(np.asarray, loss)):
        step = step_of(
            lambda loss, bad, convert=convert: convert(LOSSES[kind](loss, bad)), is_traced=False
        )
        with pytest.raises(jstep.NanLossDuringTrainingError, match="at step 3"):
            train(step, [jstep.NanLossHook(every_n_steps=1)])


def test_a_metric_below_a_loss_is_no_loss():
    step = step_of(
        lambda loss, bad: loss, lambda metrics: metrics | {"loss/note": jnp.full((), jnp.nan)}
    )
    assert jstep.global_step(train(step, [jstep.NanLossHook(every_n_steps=1)])) == 8


def test_a_loss_that_holds_no_number_is_an_error():
    step = step_of(lambda loss, bad: "small", is_traced=False)
    with pytest.raises(TypeError, match="NanLossHook: 'loss' is a str; must be numbers"):
        train(step, [jstep.NanLossHook(every_n_steps=1)])


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_run_whose_losses_are_bad_saves_no_checkpoint_at_an_error(steps_per_call, tmp_path):
    def fails(step, state, metrics):
        if step >= BAD_STEP:
            raise RuntimeError("failed")

    step = step_of(LOSSES["imaginary part"])
    with pytest.raises(RuntimeError, match="failed"):
        train(
            step,
            [jstep.every(1, fails)],
            checkpoint_dir=tmp_path,
            steps_per_call=steps_per_call,
            last_step=3,
        )
    assert jstep.latest_checkpoint(tmp_path) is None


# Metrics in any mapping.


@pytest.mark.thorough(except_for=["frozen-1-True", "frozen-4-True", "default-1-False"])
@pytest.mark.parametrize(("steps_per_call", "is_traced"), [(1, True), (4, True), (1, False)])
@pytest.mark.parametrize("kind", MAPPINGS)
def test_hooks_see_metrics_in_any_mapping(kind, steps_per_call, is_traced, tmp_path):
    step = step_of(lambda loss, bad: loss, MAPPINGS[kind], is_traced=is_traced)
    rows, means = {}, {}
    history = jstep.History(every_n_steps=2)
    hooks = [
        jstep.MetricsHook(rows.__setitem__, every_n_steps=2),
        jstep.MetricsHook(means.__setitem__, every_n_steps=2, mean=True),
        history,
    ]
    train(step, hooks, steps_per_call=steps_per_call, logdir=tmp_path)
    shown = ["learning_rate", "loss", "other"]  # with the rate of the optimizer that the step calls
    assert [sorted(row) for row in rows.values()] == [shown] * 4
    assert [sorted(row) for row in means.values()] == [shown] * 4
    assert len(history["loss"][0]) == 4
    with pytest.raises(jstep.NanLossDuringTrainingError):
        train(
            step_of(lambda loss, bad: bad, MAPPINGS[kind], is_traced=is_traced),
            [jstep.NanLossHook(every_n_steps=1)],
            steps_per_call=steps_per_call,
        )


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_nested_metrics_are_in_rows_means_logs_and_the_record(steps_per_call, tmp_path, caplog):
    step = step_of(
        lambda loss, bad: loss, lambda metrics: {**metrics, "world": {"kl": metrics["loss"]}}
    )
    rows = {}
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, jstep.gradient_descent(0.1))
    with caplog.at_level("INFO", logger="jstep"):
        jstep.train(
            step, state, lambda n: np.ones(3, np.float32), 4, log_steps=2, checkpoint_dir=tmp_path,
            hooks=[jstep.MetricsHook(rows.__setitem__, every_n_steps=2, mean=True)],
            steps_per_call=steps_per_call,
        )  # fmt: skip
    assert sorted(rows[4]) == ["learning_rate", "loss", "other", "world/kl"]
    assert "world/kl 0." in caplog.text
    assert "world/kl" in jstep.runs(tmp_path)[0].metrics


# Skipped updates of custom steps.


def nan_at(*steps):
    return lambda n: np.full(3, np.nan if n + 1 in steps else 1.0, np.float32)


def custom_step(optimizer, kind="apply"):
    """Return a step that reports nothing of its guard."""

    def loss_fn(params, x):
        return jnp.mean((params["w"] - x) ** 2)

    inner = jstep.minimize(loss_fn, optimizer, jit=False, increment_global_step=False)

    def apply(state, x):
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, x)
        return jstep.apply_gradients(state, gradients, optimizer), {"loss": loss}

    def several(state, x):
        state, metrics = jax.lax.scan(lambda state, _: inner(state, x), state, None, length=2)
        return jstep.increment_global_step(state), {"loss": metrics["loss"][-1]}

    def branches(state, x):
        def collect(state):
            return jstep.increment_global_step(state), {"loss": jnp.float32(0.0)}

        return jax.lax.cond(
            state.global_step % 2 == 0, lambda state: apply(state, x), collect, state
        )

    return {"apply": apply, "several": several, "branches": branches}[kind]


GUARDS = {
    "skip": jstep.skip_nonfinite,
    "scale": jstep.dynamic_loss_scale,
    "both": lambda optimizer: jstep.dynamic_loss_scale(jstep.skip_nonfinite(optimizer)),
    "scope": lambda optimizer: jstep.scope(jstep.skip_nonfinite(optimizer), "all"),
    "label": lambda optimizer: jstep.partition(
        {"a": jstep.skip_nonfinite(optimizer)}, lambda path, leaf: "a"
    ),
    "masters": lambda optimizer: jstep.skip_nonfinite(jstep.master_weights(optimizer)),
    "compact": lambda optimizer: jstep.skip_nonfinite(jstep.compact(optimizer, min_size=0)),
}


@pytest.mark.thorough(except_for=["skip-1", "skip-4", "label-4"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("guard", [name for name in GUARDS if name not in ("scale", "both")])
def test_a_skipped_update_of_a_custom_step_is_found_in_the_state(guard, steps_per_call):
    optimizer = GUARDS[guard](jstep.adam(0.1))
    for step in (
        jstep.TrainStep(custom_step(optimizer)),
        jax.jit(custom_step(optimizer)),
        custom_step(optimizer),
    ):
        rows = {}
        hooks = [
            jstep.NanLossHook(every_n_steps=2),
            jstep.MetricsHook(rows.__setitem__, every_n_steps=1),
        ]
        state = train(
            step, hooks, optimizer=optimizer, batches=nan_at(3, 6), steps_per_call=steps_per_call
        )
        assert [n for n, row in rows.items() if row["skipped"] == 1] == [3, 6]
        assert np.isfinite(state.params["w"]).all()


def scaled_step(optimizer):
    return jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer, jit=False)


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("guard", ["scale", "both"])
def test_a_smaller_loss_scale_is_a_skipped_update(guard, steps_per_call):
    optimizer = GUARDS[guard](jstep.adam(0.1))
    update = scaled_step(optimizer)

    def step(state, x):
        state, metrics = update(state, x)
        return state, {"loss": metrics["loss"]}

    for custom in (jstep.TrainStep(step), jax.jit(step, donate_argnums=0)):
        train(custom, [jstep.NanLossHook(every_n_steps=2)], optimizer=optimizer,
              batches=nan_at(3, 4), steps_per_call=steps_per_call)  # fmt: skip


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("kind", ["apply", "several"])
def test_too_many_skipped_updates_of_a_custom_step_stop_the_run(kind, steps_per_call):
    optimizer = jstep.skip_nonfinite(jstep.adam(0.1))
    hooks = [jstep.NanLossHook(every_n_steps=1, max_skipped_steps=3)]
    step = jstep.TrainStep(custom_step(optimizer, kind))
    train(step, hooks, optimizer=optimizer, batches=nan_at(1, 3, 4), steps_per_call=steps_per_call)
    with pytest.raises(
        jstep.NanLossDuringTrainingError, match="3 updates in a row were skipped up to step 6"
    ):
        train(
            step,
            hooks,
            optimizer=optimizer,
            batches=nan_at(2, 4, 5, 6),
            steps_per_call=steps_per_call,
        )


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_step_without_an_update_is_not_a_skipped_one(steps_per_call):
    optimizer = jstep.skip_nonfinite(jstep.adam(0.1))
    rows = {}
    hooks = [
        jstep.NanLossHook(every_n_steps=1, max_skipped_steps=1),
        jstep.MetricsHook(rows.__setitem__, every_n_steps=1),
    ]
    step = jstep.TrainStep(custom_step(optimizer, "branches"))
    state = train(step, hooks, optimizer=optimizer, steps_per_call=steps_per_call)
    assert {row["skipped"] for row in rows.values()} == {0.0}
    assert int(state.slots["last_finite_step"]) == 7  # of the update 6 → 7


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_what_is_applied_beside_a_guard_counts(steps_per_call):
    """A player without a guard becomes NaN: the step is not skipped, although the other's update
    was."""
    optimizer = jstep.partition(
        {"guarded": jstep.skip_nonfinite(jstep.sgd(0.1)), "free": jstep.sgd(0.1)},
        lambda path, leaf: "free" if path == "v" else "guarded",
    )

    def loss_fn(params, x):
        return jnp.mean((params["w"] + params["v"] - x) ** 2)

    def step(state, x):
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, x)
        return jstep.apply_gradients(state, gradients, optimizer), {"loss": loss}

    state = jstep.TrainState.create({"w": jnp.zeros(3), "v": jnp.zeros(3)}, optimizer)
    with pytest.raises(jstep.NanLossDuringTrainingError, match="at step 3"):
        jstep.train(jstep.TrainStep(step), state, nan_at(3), 8,
                    hooks=[jstep.NanLossHook(every_n_steps=1)], log_steps=None, progress=False,
                    steps_per_call=steps_per_call)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_skips_on_a_mesh(axis_type, steps_per_call):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    optimizer = jstep.skip_nonfinite(jstep.adam(0.1))
    state = jstep.TrainState.create(
        {"w": jnp.zeros(4)},
        optimizer,
        mesh=mesh,
        param_specs={"w": jax.sharding.PartitionSpec("data")},
    )
    step = jstep.TrainStep(custom_step(optimizer))
    batches = nan_at(3)
    rows = {}
    hooks = [
        jstep.NanLossHook(every_n_steps=1),
        jstep.MetricsHook(rows.__setitem__, every_n_steps=1),
    ]
    state = jstep.train(step, state, lambda n: batches(n)[:1], 6, hooks=hooks, log_steps=None,
                        progress=False, steps_per_call=steps_per_call)  # fmt: skip
    assert [n for n, row in rows.items() if row["skipped"] == 1] == [3]
