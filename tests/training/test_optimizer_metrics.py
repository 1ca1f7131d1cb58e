"""What the optimizers of a custom step report: as of a `minimize`, whoever compiles the step."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

MAKERS = {
    "TrainStep": jstep.TrainStep,
    "jax.jit": jax.jit,
    "donating": lambda step: jax.jit(step, donate_argnums=0),
    "not compiled": lambda step: step,
}
OPTIMIZERS = {
    "constant": jstep.adam(0.1),
    "schedule": jstep.adam(jstep.exponential_decay(0.1, 10, 0.5)),
    "held": jstep.adam(jstep.held("learning_rate", 0.1)),
    "labels": jstep.partition(
        {"a": jstep.sgd(0.1), "a/b": jstep.adam(jstep.held("learning_rate", 0.2))},
        lambda path, leaf: "a" if path == "w" else "a/b",
    ),
    "guarded": jstep.skip_nonfinite(jstep.lion(jstep.linear(0.1, 0.0, 20))),
}


def loss_fn(params, x):
    return jnp.mean((params["w"] + params["v"] - x) ** 2)


def fresh_state(optimizer):
    return jstep.TrainState.create({"v": jnp.zeros(4), "w": jnp.zeros(4)}, optimizer)


def custom(optimizer):
    def step(state, x):
        loss, gradients = jstep.compute_gradients(loss_fn)(state.params, x)
        return jstep.apply_gradients(state, gradients, optimizer), {"loss": loss}

    return step


class HalveAt4(jstep.Hook):
    """Halves a held rate, as a plateau does."""

    def after_step(self, step, state, metrics):
        names = [name for name in state.slots if "held/" in name]
        if step != 4 or not names:
            return None
        name = names[0].replace("held/", "")
        return jstep.set_hyperparameter(state, name, jstep.get_hyperparameter(state, name) / 2)


def rows_of(step, optimizer, **options):
    """What hooks and rows show of the steps."""
    seen = {}
    rows = []
    reporting = jstep.MetricsHook(lambda step, row: rows.append((step, row)), every_n_steps=2)
    hooks = [
        jstep.every(
            1,
            lambda step, state, metrics: seen.update(
                {step: {n: float(x) for n, x in metrics.items()}}
            ),
        ),
        reporting,
        HalveAt4(),
    ]
    jstep.train(
        step,
        fresh_state(optimizer),
        lambda n: np.ones(4, np.float32),
        6,
        log_steps=None,
        hooks=hooks,
        **options,
    )
    return seen, rows, reporting.constants


def assert_alike(shown, expected):
    """Equal up to rounding, with the same names in the same rows."""
    for values, others in zip(shown, expected, strict=True):
        assert [key for key, _ in sorted(dict(values).items())] == [
            key for key, _ in sorted(dict(others).items())
        ]
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), dict(values), dict(others)
        )


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == "held" else pytest.mark.thorough)
        for kind in OPTIMIZERS
    ],
)
def test_custom_steps_show_what_minimize_shows(kind, make):
    optimizer = OPTIMIZERS[kind]
    expected = rows_of(jstep.minimize(loss_fn, optimizer), optimizer)
    assert_alike(rows_of(MAKERS[make](custom(optimizer)), optimizer), expected)


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("make", MAKERS)
def test_the_metrics_of_an_inner_minimize_are_shown_as_its_own(make, steps_per_call):
    if make == "not compiled" and steps_per_call == 4:
        pytest.skip("train compiles it")
    optimizer = OPTIMIZERS["schedule"]
    update = jstep.minimize(loss_fn, optimizer, donate=False)
    update(fresh_state(optimizer), np.ones(4, np.float32))  # traced before it is called in a step

    def step(state, x):
        state, metrics = update(state, x)
        return state, {**metrics, "epsilon": metrics["loss"] * 2}

    seen, rows, constants = rows_of(MAKERS[make](step), optimizer, steps_per_call=steps_per_call)
    assert set(constants) == {"beta1", "beta2"}
    # A metric of the step's own that is named like a hyperparameter is another one.
    assert [set(row) for _, row in rows] == [{"loss", "learning_rate", "epsilon"}] * 3
    assert seen[6]["epsilon"] == pytest.approx(2 * seen[6]["loss"])


def test_a_step_that_was_compiled_before_the_run_and_a_second_run_show_it_too():
    optimizer = OPTIMIZERS["held"]
    step = jax.jit(custom(optimizer))
    step(fresh_state(optimizer), np.ones(4, np.float32))
    first = rows_of(step, optimizer)
    assert [row["learning_rate"] for _, row in first[1]] == pytest.approx([0.1, 0.1, 0.05])
    # The step is compiled for another structure in between.
    other = OPTIMIZERS["constant"]
    rows_of(jax.jit(custom(other)), other)
    assert_alike(rows_of(step, optimizer), first)


def test_a_step_that_is_not_compiled_may_call_an_optimizer_each_time():
    optimizers = [jstep.sgd(0.5), jstep.sgd(0.25)]
    calls = []

    def step(state, x):
        calls.append(len(calls))
        return custom(optimizers[calls[-1] % 2])(state, x)

    seen, _, _ = rows_of(step, optimizers[0])
    assert [seen[step]["learning_rate"] for step in range(1, 7)] == [0.5, 0.25] * 3


def test_an_optimizer_that_is_made_at_each_call_is_shown():
    seen, _, _ = rows_of(lambda state, x: custom(jstep.sgd(0.5))(state, x), jstep.sgd(0.5))
    assert [seen[step]["learning_rate"] for step in seen] == [0.5] * 6


def test_a_nested_state_is_not_shown():
    inner_optimizer = jstep.adam(0.3)
    optimizer = jstep.sgd(0.5)

    def step(state, x):
        inner, _ = custom(inner_optimizer)(state.model_state, x)
        state, metrics = custom(optimizer)(state, x)
        return state.replace(model_state=inner), metrics

    state = jstep.TrainState.create(
        {"v": jnp.zeros(4), "w": jnp.zeros(4)}, optimizer, model_state=fresh_state(inner_optimizer)
    )
    shown = []
    hook = jstep.every(1, lambda step, state, metrics: shown.append(metrics))
    jstep.train(
        jax.jit(step), state, lambda n: np.ones(4, np.float32), 2, log_steps=None, hooks=[hook]
    )
    assert all(metrics["learning_rate"] == 0.5 and "beta1" not in metrics for metrics in shown)


def test_hyperparameters_that_need_a_concrete_step_end_no_run():
    optimizer = jstep.sgd(0.5)
    odd = optimizer._replace(
        hyperparameters=lambda step: {"learning_rate": 0.5 if int(step) < 3 else 0.1}
    )
    seen, _, _ = rows_of(jax.jit(custom(odd)), odd)
    assert set(seen[6]) == {"loss"}


# A step that is not compiled and calls functions that the user compiles: JAX traces these once in a
# process, and only then are their updates seen.


def compiled_update(optimizer):
    @jax.jit
    def update(state, x):
        loss, gradients = jstep.compute_gradients(loss_fn)(state.params, x)
        return jstep.apply_gradients(state, gradients, optimizer), loss

    return update


def around(update):
    def step(state, x):
        state, loss = update(state, x)
        return state, {"loss": loss}

    return step


class Trainer:
    def __init__(self, optimizer):
        self.update = compiled_update(optimizer)

    def step(self, state, x):
        return around(self.update)(state, x)

    __call__ = step


class Frozen(Trainer):
    def __setattr__(self, name, value):
        if name != "update":
            raise dataclasses.FrozenInstanceError(name)
        super().__setattr__(name, value)


AROUND = {
    "function": lambda optimizer: around(compiled_update(optimizer)),
    "lambda": lambda optimizer: (lambda step: lambda state, x: step(state, x))(
        around(compiled_update(optimizer))
    ),
    "partial": lambda optimizer: functools.partial(
        lambda f, state, x: around(f)(state, x), compiled_update(optimizer)
    ),
    "bound method": lambda optimizer: Trainer(optimizer).step,
    "object": Trainer,
    "frozen object": Frozen,
    "TrainStep": lambda optimizer: jstep.TrainStep(around(compiled_update(optimizer))),
    "jax.jit": lambda optimizer: jax.jit(around(compiled_update(optimizer))),
}  # fmt: skip


@pytest.mark.thorough(except_for={"steps_per_call": [1]})
@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("make", AROUND)
def test_each_run_of_a_process_shows_what_the_first_one_did(make, steps_per_call, tmp_path):
    optimizer = OPTIMIZERS["held"]
    step = AROUND[make](optimizer)
    first = rows_of(step, optimizer, steps_per_call=steps_per_call)
    assert [set(row) for _, row in first[1]] == [{"loss", "learning_rate"}] * 3
    assert first[2]
    assert_alike(rows_of(step, optimizer, steps_per_call=steps_per_call), first)
    assert_alike(rows_of(step, optimizer, steps_per_call=1), first)


def test_batches_of_another_shape_show_what_the_first_ones_did():
    """The gradients are traced for each shape of the batch, and the update is not."""
    optimizer = OPTIMIZERS["schedule"]
    update = jax.jit(lambda state, gradients: jstep.apply_gradients(state, gradients, optimizer))

    def step(state, x):
        loss, gradients = jstep.compute_gradients(loss_fn)(state.params, x)
        return update(state, gradients), {"loss": loss}

    rates = rates_of(step, optimizer, batches=lambda n: np.ones(1 if n % 2 else 4, np.float32))
    assert rates == pytest.approx(
        [float(jstep.exponential_decay(0.1, 10, 0.5)(n)) for n in range(6)]
    )


def rates_of(step, optimizer, batches=lambda n: np.ones(4, np.float32)):
    rates = []
    hook = jstep.MetricsHook(
        lambda step, row: rates.append(row.get("learning_rate")), every_n_steps=1
    )
    jstep.train(step, fresh_state(optimizer), batches, 6, log_steps=None, hooks=[hook])
    return rates


def test_a_step_that_changes_to_another_compiled_update_shows_no_rate_of_the_first_one():
    schedule, constant = jstep.linear(0.5, 0.25, 1), jstep.linear(0.125, 0.125, 1)
    updates = [compiled_update(jstep.sgd(schedule)), compiled_update(jstep.sgd(constant))]

    def step(state, x):
        return around(updates[int(state.global_step) >= 2])(state, x)

    # A call that does not trace its update does not say which one it makes.
    assert rates_of(step, jstep.sgd(0.1)) == [0.5, 0.25, 0.125, None, None, None]
    assert rates_of(step, jstep.sgd(0.1)) == [None] * 6


def test_a_call_that_compiles_nothing_shows_its_own_optimizer_only():
    optimizers = [jstep.adamw(0.5), jstep.adam(0.25)]
    seen, _, _ = rows_of(
        lambda state, x: custom(optimizers[int(state.global_step) % 2])(state, x), optimizers[0]
    )
    assert ["weight_decay" in seen[step] for step in range(1, 7)] == [True, False] * 3


def test_of_two_updates_in_a_step_the_later_one_is_shown_at_each_step():
    first, second = jstep.sgd(jstep.linear(0.5, 0.5, 1)), jstep.sgd(jstep.linear(0.25, 0.25, 1))
    update = compiled_update(second)

    def step(state, x):
        gradients = jstep.compute_gradients(loss_fn)(state.params, x)[1]
        state = jstep.apply_gradients(state, gradients, first, increment_global_step=False)
        return around(update)(state, x)

    assert rates_of(step, first) == [0.25] * 6


def test_a_trainer_whose_schedule_uses_it_is_not_kept_alive():
    class Scheduled(Trainer):
        def __init__(self):
            self.rate = 0.5
            super().__init__(jstep.sgd(lambda step: self.rate))

    trainer = Scheduled()
    assert (
        rates_of(trainer.step, jstep.sgd(0.1))
        == rates_of(trainer.step, jstep.sgd(0.1))
        == [0.5] * 6
    )
    alive = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert alive() is None


def test_a_compiled_step_that_was_called_before_the_run_shows_what_its_compiled_functions_update():
    optimizer = OPTIMIZERS["schedule"]
    step = jax.jit(around(compiled_update(optimizer)))
    step(fresh_state(optimizer), np.ones(4, np.float32))
    assert rates_of(step, optimizer)[0] == pytest.approx(0.1)
