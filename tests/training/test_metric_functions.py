"""`minimize(metrics=…)` with functions of gradients, updates and parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regression import X as X_OF_CONSTANTS
from regression import Y, fresh
from regression import loss_fn as loss_fn_of_constants

import jstep
from jstep.metering.device_sums import Accumulate
from jstep.training.looped import loop_step
from jstep.training.metrics import Constants, split_metrics
from jstep.training.step import call_step

X = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)
PARAMS = {
    "a": {"w": jnp.full((4, 8), 0.5), "b": jnp.ones(8)},
    "still": jnp.ones(3),
    "n": jnp.array(2),
}


def loss_fn(params, x):
    return jnp.mean((x @ params["a"]["w"] + params["a"]["b"][None]) ** 2)


def norms(gradients, updates, params):
    assert gradients["still"] is None
    assert gradients["n"] is None
    assert updates["still"] is None
    trees = {"grad": gradients, "update": updates, "new": {"a": params["a"]}}
    return {
        f"{what}/{k}": v for what, tree in trees.items() for k, v in jstep.layer_norms(tree).items()
    }


def product(gradients, updates, params):
    """It combines trees that may be sharded in different ways."""
    return {"product": jnp.sum(gradients["a"]["w"] * updates["a"]["w"] * params["a"]["w"])}


def run(optimizer, steps=2, state=None, **kwargs):
    state = jstep.TrainState.create(PARAMS, optimizer) if state is None else state
    step = jstep.minimize(loss_fn, optimizer, **kwargs)
    for _ in range(steps):
        state, metrics = step(state, X)
    assert step._cache_size() == 1
    return state, metrics


OPTIMIZERS = {
    "clipped": lambda: jstep.chain(jstep.clip_gradients(by_global_norm=0.01), jstep.adam(0.1)),
    "scaled": lambda: jstep.dynamic_loss_scale(jstep.adam(0.1), initial=8.0),
    "guarded": lambda: jstep.skip_nonfinite(jstep.momentum(0.1, 0.9)),
    "accumulated": lambda: jstep.update_every(jstep.adam(0.1), 2, accumulate=True),
    "projected": lambda: jstep.with_projection(
        jstep.adam(0.1), lambda p: jax.tree.map(lambda x: x * 1, p)
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_functions_see_raw_gradients_updates_and_new_params(name):
    optimizer = OPTIMIZERS[name]()
    state, metrics = run(optimizer, metrics=["grad_norm", "update_norm", norms, product])
    assert state == run(optimizer)[0]
    np.testing.assert_allclose(metrics["grad/a"], metrics["grad_norm"], rtol=1e-6)
    np.testing.assert_allclose(metrics["update/a"], metrics["update_norm"], rtol=1e-6)
    np.testing.assert_allclose(metrics["new/a"], jstep.global_norm(state.params["a"]), rtol=1e-6)
    before, _ = run(optimizer, 1)
    np.testing.assert_allclose(
        metrics["grad/a"],
        jstep.global_norm(jax.grad(loss_fn, allow_int=True)(before.params, X)["a"]),
        rtol=1e-5,
    )
    assert {metrics[key].shape for key in ("grad/a", "update/a", "new/a", "product")} == {()}


FORMS = {
    "microbatches": {"num_microbatches": 4},
    "lanes": {"lanes": 4},
    "uncompiled": {"jit": False},
}


@pytest.mark.thorough(except_for=["microbatches"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_step(form):
    optimizer = jstep.adam(0.1)
    _, want = run(optimizer, metrics=[norms, product])
    step = jstep.minimize(loss_fn, optimizer, metrics=[norms, product], **FORMS[form])
    state = jstep.TrainState.create(PARAMS, optimizer)
    for _ in range(2):
        state, metrics = step(state, X)
    for key in ("grad/a", "update/a", "new/a", "product"):
        np.testing.assert_allclose(metrics[key], want[key], rtol=1e-4)


def test_a_skipped_update_is_zero_and_a_frozen_leaf_is_none():
    guarded = jstep.skip_nonfinite(jstep.gradient_descent(0.5))
    optimizer = jstep.partition({"a": guarded}, lambda path, leaf: "a" if path == "a" else None)
    found = []

    def look(gradients, updates, params):
        found.append((gradients["b"], updates["b"]))
        return {"u": updates["a"], "p": params["a"], "g": gradients["a"]}

    step = jstep.minimize(lambda p: jnp.log(p["a"]) + p["b"], optimizer, metrics={look})
    _, metrics = step(jstep.TrainState.create({"a": 0.0, "b": 1.0}, optimizer))
    assert found == [(None, None)]
    assert (float(metrics["u"]), float(metrics["p"]), float(metrics["g"])) == (
        0.0,
        0.0,
        float("inf"),
    )
    assert float(metrics["a/skipped"]) == 1.0


class Refusal(Exception):  # noqa: N818
    pass


def test_errors_of_a_function_stay_and_name_it():
    def refuse(gradients, updates, params):
        raise Refusal("no")

    def look(gradients, updates, params):
        return {"big": 1.0 if jstep.global_norm(updates) > 1 else 0.0}

    for fn, kind in ((refuse, Refusal), (look, jax.errors.TracerBoolConversionError)):
        with pytest.raises(kind) as caught:
            run(jstep.gradient_descent(0.5), metrics=["grad_norm", fn])
        assert sum(f"metrics[1]={fn.__name__}" in line for line in caught.value.__notes__) == 1


# Constant metrics: values that the step does not compute belong to the traced program.


def by_shape(state, x):
    """A step whose constant metric depends on the shape of the batch."""
    return state, {"rows": np.float32(x.shape[0]), "mean": jnp.mean(x)}


def constants_of(step, *args):
    """The names of the constant metrics of a call of a step."""
    return set(call_step(step, args[0], args[1:])[1].constants.all)


def test_a_function_may_return_a_mean_of():
    def ratio(gradients, updates, params):
        return {"ratio": jstep.metrics.mean_of(jnp.sum(gradients["a"]["b"]), 8)}

    _, metrics = run(jstep.adam(0.1), 1, metrics=ratio)
    assert metrics["ratio"] == jax.tree.map(
        jnp.float32, jstep.metrics.mean_of(metrics["ratio"].total, 8)
    )
    assert metrics["ratio"].total > 0


def test_constants_belong_to_the_program_that_ran():
    step = jstep.TrainStep(by_shape, donate=False)
    state = fresh(jstep.gradient_descent(0.1))
    seen = [float(step(state, jnp.ones(n))[1]["rows"]) for n in (2, 3, 2, 3)]
    assert seen == [2, 3, 2, 3]
    assert constants_of(step, state, jnp.ones(2)) == {"rows"}
    assert float(jstep.scan_steps(step)(state, jnp.ones((4, 5)))[1]["rows"][3]) == 5


def test_custom_hyperparameter_numbers_are_constants():
    base = jstep.gradient_descent(0.5)
    custom = base._replace(
        hyperparameters=lambda step: {"a": 0.25, "b": np.float32(3), "c": 7, "d": True}
    )
    step = jstep.minimize(loss_fn_of_constants, custom)
    state, metrics = step(fresh(custom), X_OF_CONSTANTS, Y)
    assert constants_of(step, fresh(custom), X_OF_CONSTANTS, Y) == {"a", "b", "c", "d"}
    assert {name: metrics[name].item() for name in "abcd"} == {
        "a": 0.25,
        "b": 3.0,
        "c": 7,
        "d": True,
    }
    assert all(isinstance(metrics[name], np.generic) for name in "abcd")
    traced = step.trace(state, X_OF_CONSTANTS, Y)
    assert jax.tree.structure(traced.out_info[1]) == jax.tree.structure(metrics)


def test_numbers_that_32_bits_hold_are_constants():
    values = {
        "low": -(2**31),
        "high": 2**31 - 1,
        "flag": True,
        "half": 0.5,
        "array": np.int64(3),
        "off": np.bool_(False),
    }
    others = {
        "below": -(2**31) - 1,
        "above": 2**31,
        "vector": np.ones(2),
        "text": np.str_("x"),
        "jax": jnp.float32(1),
    }
    computed, constants = split_metrics(values | others)
    assert list(computed) == list(others)
    kinds = {"i": "int32", "f": "float32", "b": "bool"}
    assert {name: (one, str(one.dtype)) for name, one in constants.all.items()} == {
        name: (value, kinds[np.asarray(value).dtype.kind]) for name, value in values.items()
    }


# Steps in the loop of a call.


def test_decorated_step_is_another_step():
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(loss_fn_of_constants, optimizer)
    accumulate = Accumulate()
    first = loop_step(step, 2, accumulate)

    @functools.wraps(step)
    def frozen(state, *args):
        new, metrics = step(state, *args)
        return new.replace(params=state.params), metrics

    assert loop_step(frozen, 2, accumulate) is loop_step(frozen, 2, Accumulate()) is not first
    assert loop_step(step, 2, accumulate) is first is not loop_step(step, 3, accumulate)
    batches = [(X_OF_CONSTANTS, Y)] * 4
    trained = jstep.train(frozen, fresh(optimizer), batches, 4, steps_per_call=2, progress=False)
    np.testing.assert_array_equal(trained.params["w"], 1.0)


# Returned metrics do not share memory with the step.


def test_metrics_may_be_donated_and_deleted():
    optimizer = jstep.skip_nonfinite(jstep.adam(0.1))
    step = jstep.minimize(loss_fn_of_constants, optimizer)
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
    state, total = step(fresh(optimizer), X_OF_CONSTANTS, Y)
    state, metrics = step(state, X_OF_CONSTANTS, Y)
    total = add(add(total, metrics), metrics)
    np.testing.assert_allclose(total["beta1"], 2.7, rtol=1e-6)
    for value in metrics.values():
        if isinstance(value, jax.Array):
            value.delete()
    metrics.clear()
    state, metrics = step(state, X_OF_CONSTANTS, Y)
    assert float(metrics["beta1"]) == pytest.approx(0.9)
    with pytest.raises((TypeError, ValueError)):
        metrics["beta1"][...] = 0


# Results of a step that are no dict, and constant metrics by their bits.


def test_constants_are_equal_by_their_bits():
    """They are static metadata of a program: a NaN equals itself, and a guard's metric counts."""
    nan = np.float32(np.nan)
    one, same = (Constants({"a": nan, "b": np.float32(0)}, "skipped") for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    others = [
        Constants({"a": nan, "b": np.float32(-0.0)}, "skipped"),
        Constants({"a": nan, "b": np.float32(0)}),
    ]
    others += [
        Constants({"a": nan, "b": np.float64(0)}, "skipped"),
        Constants({"a": nan}, "skipped"),
    ]
    assert [one == other for other in [*others, "skipped"]] == [False] * 5
    repeated = one.repeated(3)
    assert {name: value.tolist() for name, value in repeated.all.items() if name == "b"} == {
        "b": [0.0] * 3
    }
    assert repeated.all["a"].shape == (3,)
    assert repeated.skipped == "skipped"


# State values in the metrics: loss scales, skipped steps, and held hyperparameters.

X_OF_SLOTS = jnp.arange(1.0, 5.0)


def loss_fn_of_slots(params, x):
    return jnp.mean(params["w"] * x)


def fresh_of_slots(optimizer):
    return jstep.TrainState.create({"w": jnp.float32(2.0)}, optimizer)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [1, 2])
def test_loss_is_scaled_but_reported_unscaled(n):
    plain = jstep.gradient_descent(0.5)
    optimizer = jstep.dynamic_loss_scale(plain, initial=8.0, period=2)
    kwargs = {"metrics": ("grad_norm", "update_norm"), "num_microbatches": n}
    want, want_metrics = jstep.minimize(loss_fn_of_slots, plain, **kwargs)(
        fresh_of_slots(plain), X_OF_SLOTS
    )
    step = jstep.minimize(loss_fn_of_slots, optimizer, **kwargs)
    state, metrics = step(fresh_of_slots(optimizer), X_OF_SLOTS)
    np.testing.assert_allclose(state.params["w"], want.params["w"])
    for name in want_metrics:
        np.testing.assert_allclose(metrics[name], want_metrics[name], rtol=1e-6)
    assert float(metrics["loss_scale"]) == 8.0
    state, metrics = step(state, X_OF_SLOTS)
    assert (float(metrics["loss_scale"]), float(state.slots["loss_scale"])) == (8.0, 16.0)
    state, metrics = step(state, X_OF_SLOTS.at[0].set(jnp.inf))
    assert (float(metrics["loss_scale"]), float(state.slots["loss_scale"])) == (16.0, 8.0)
    assert jstep.global_step(state) == 3


def test_skips_and_held_hyperparameters_are_metrics():
    optimizer = jstep.skip_nonfinite(jstep.gradient_descent(jstep.held("learning_rate", 0.5)))
    step = jstep.minimize(loss_fn_of_slots, optimizer)
    state, metrics = step(fresh_of_slots(optimizer), X_OF_SLOTS)
    assert float(metrics["skipped"]) == 0
    assert float(metrics["learning_rate"]) == 0.5
    state = jstep.set_hyperparameter(state, "learning_rate", 0.25)
    state, metrics = step(state, X_OF_SLOTS * jnp.nan)
    assert float(metrics["skipped"]) == 1
    assert float(metrics["learning_rate"]) == 0.25
    _, metrics = jstep.scan_steps(step)(state, jnp.stack([X_OF_SLOTS, X_OF_SLOTS * jnp.nan]))
    np.testing.assert_array_equal(metrics["skipped"], [0, 1])


@pytest.mark.thorough(except_for=["1e+30-0.0"])
@pytest.mark.parametrize(("gradient", "skipped"), [(1.0, 1.0), (1e30, 0.0)])
def test_an_update_is_not_skipped_if_a_slot_outside_of_the_guard_overflowed(gradient, skipped):
    """The update of "b" is finite, but not the sum of its squared gradients: a later update can't
    be right."""
    optimizer = jstep.partition(
        {"a": jstep.skip_nonfinite(jstep.gradient_descent(0.5)), "b": jstep.adagrad(0.5)},
        lambda path, leaf: path,
    )
    state = jstep.TrainState.create({"a": 1.0, "b": 1.0}, optimizer)
    step = jstep.minimize(lambda params, x: params["a"] * x[0] + params["b"] * x[1], optimizer)
    state, metrics = step(state, jnp.array([jnp.nan, gradient]))
    assert np.all(np.isfinite(jax.tree.leaves(state.params)))
    assert float(metrics["skipped"]) == skipped
