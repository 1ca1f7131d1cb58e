"""Trajectories of the classic optimizers, compared with their equations in NumPy float64
(tests/reference.py)."""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jstep

EXACT = {"rtol": 1e-11, "atol": 1e-13}
# Schedules are tables, so that both sides read the same numbers.
FALLING = np.linspace(0.3, 0.05, 64)
RISING = np.linspace(0.5, 0.95, 64)


class Case(NamedTuple):
    make: Callable[..., jstep.Optimizer]
    rule: reference.Rule
    slots: dict[str, float]
    hyper: dict[str, Any]
    """All hyperparameters by name; arrays are schedules. Those not in `defaults` are passed by
    keyword."""
    static: Mapping[str, Any] = MappingProxyType({})
    defaults: tuple[str, ...] = ()


OF_FTRL = {
    "learning_rate": 0.3,
    "learning_rate_power": -0.5,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
    "beta": 0.0,
}
OF_ADAM = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
OF_RMSPROP = {"learning_rate": 0.1, "decay": 0.9, "momentum": 0.0, "epsilon": 1e-10}
OTHERS = {"learning_rate": 0.05, "decay": 0.7, "momentum": 0.6, "epsilon": 0.01}
SCHEDULED = {"learning_rate": FALLING, "decay": RISING, "momentum": RISING, "epsilon": FALLING}
RMS = {"rms": 1.0, "momentum": 0.0}


DESCENT = partial(Case, jstep.gradient_descent, reference.gradient_descent, {})
MOMENTUM = partial(Case, jstep.momentum, reference.momentum, {"momentum": 0.0})
NESTEROV = partial(
    Case, jstep.momentum, reference.nesterov, {"momentum": 0.0}, static={"use_nesterov": True}
)
ADAGRAD = partial(Case, jstep.adagrad, reference.adagrad)
ADAM = partial(Case, jstep.adam, reference.adam, {"m": 0.0, "v": 0.0})
RMSPROP = partial(Case, jstep.rmsprop, reference.rmsprop, RMS)
CENTERED = partial(
    Case, jstep.rmsprop, reference.rmsprop_centered, RMS | {"mg": 0.0}, static={"centered": True}
)


def ftrl_case(accum=0.1, **changes):
    slots = {"accum": accum, "linear": 0.0}
    return Case(
        jstep.ftrl, reference.ftrl, slots, OF_FTRL | changes, {"initial_accumulator_value": accum}
    )


CASES = {
    "gradient_descent-scheduled": DESCENT({"learning_rate": FALLING}),
    "momentum-scheduled": MOMENTUM({"learning_rate": FALLING, "momentum": RISING}),
    "nesterov-scheduled": NESTEROV({"learning_rate": FALLING, "momentum": RISING}),
    "adagrad-defaults": ADAGRAD({"accumulator": 0.1}, {"learning_rate": 0.2}),
    "adagrad": ADAGRAD(
        {"accumulator": 0.7}, {"learning_rate": FALLING}, {"initial_accumulator_value": 0.7}
    ),
    "adam-defaults": ADAM(OF_ADAM, defaults=tuple(OF_ADAM)),
    "adam": ADAM({"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 0.1}),
    "adam-no-averaging": ADAM(OF_ADAM | {"beta1": 0.0, "beta2": 0.0}),
    "adam-rate-scheduled": ADAM(OF_ADAM | {"learning_rate": FALLING}),
    "adam-all-scheduled": ADAM(
        {"learning_rate": FALLING, "beta1": RISING, "beta2": RISING, "epsilon": FALLING}
    ),
    "rmsprop-defaults": RMSPROP(OF_RMSPROP, defaults=("decay", "momentum", "epsilon")),
    "rmsprop": RMSPROP(OTHERS),
    "rmsprop-scheduled": RMSPROP(SCHEDULED),
    "rmsprop-centered": CENTERED(OTHERS),
    "rmsprop-centered-scheduled": CENTERED(SCHEDULED),
    "ftrl-defaults": Case(
        jstep.ftrl,
        reference.ftrl,
        {"accum": 0.1, "linear": 0.0},
        OF_FTRL,
        defaults=tuple(OF_FTRL)[1:],
    ),
    "ftrl-power": ftrl_case(learning_rate_power=-0.8),
    "ftrl-fixed-rate": ftrl_case(learning_rate_power=0.0),
    "ftrl-accum-zero": ftrl_case(accum=0.0),
    "ftrl-l1": ftrl_case(l1_regularization_strength=0.9),
    "ftrl-everything": ftrl_case(
        accum=0.3,
        learning_rate=FALLING,
        learning_rate_power=-0.6,
        l1_regularization_strength=0.3,
        l2_regularization_strength=0.2,
        l2_shrinkage_regularization_strength=0.1,
        beta=0.5,
    ),
    "ftrl-everything-scheduled": ftrl_case(
        learning_rate=FALLING,
        learning_rate_power=-RISING,
        l1_regularization_strength=FALLING,
        l2_regularization_strength=RISING,
        l2_shrinkage_regularization_strength=FALLING,
        beta=RISING,
    ),
}


def table_schedule(table):
    return lambda step: jnp.asarray(table)[step]


def build(case):
    given = {name: value for name, value in case.hyper.items() if name not in case.defaults}
    return case.make(
        **{
            name: table_schedule(v) if isinstance(v, np.ndarray) else v for name, v in given.items()
        },
        **case.static,
    )


STEPS = 12
SHAPES = {"a": (3,), "b": {"c": (2, 2), "d": ()}}


def random_tree(rng, dtype):
    return jax.tree.map(
        lambda shape: np.asarray(rng.normal(size=shape)).astype(dtype),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def run(optimizers, params, gradients, first_step, start_step):
    """Return the last state of each optimizer, and the parameters of all after each step, from one
    program."""
    states = {
        name: jstep.TrainState.create(params, optimizer, start_step).replace(
            global_step=jstep.create_global_step(first_step)
        )
        for name, optimizer in optimizers.items()
    }

    @jax.jit
    def step(states, grads):
        return {
            name: jstep.apply_gradients(state, grads, optimizers[name])
            for name, state in states.items()
        }

    path = []
    for grads in gradients:
        states = step(states, grads)
        path.append({name: state.params for name, state in states.items()})
    return states, path


def check(cases, dtype, tolerance, first_step=0, start_step=0):
    rng = np.random.default_rng(7)
    params = random_tree(rng, dtype)
    gradients = [random_tree(rng, dtype) for _ in range(STEPS)]
    states, path = run(
        {name: build(case) for name, case in cases.items()},
        params,
        gradients,
        first_step,
        start_step,
    )

    for (name, case), (i, leaf) in itertools.product(
        cases.items(), enumerate(jax.tree.leaves(params))
    ):
        assert int(states[name].global_step) == first_step + STEPS
        expected, slots = reference.trajectory(
            case.rule,
            case.slots,
            leaf,
            [jax.tree.leaves(g)[i] for g in gradients],
            case.hyper,
            first_step=first_step,
            start_step=start_step,
        )
        for n, trees in enumerate(path):
            found = jax.tree.leaves(trees[name])[i]
            assert found.dtype == dtype
            np.testing.assert_allclose(
                found, expected[n], **tolerance, err_msg=f"{name} after {n + 1} updates"
            )
        assert sorted(slots) == jstep.get_slot_names(states[name])
        for slot, value in slots.items():
            np.testing.assert_allclose(
                jax.tree.leaves(states[name].slots[slot])[i],
                value,
                **tolerance,
                err_msg=f"slot {slot} of {name}",
            )


SINGLE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("part", range(4))
def test_trajectories_in_float64(part):
    check({name: CASES[name] for name in sorted(CASES)[part::4]}, np.float64, EXACT)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_trajectory_in_float32(name):
    check({name: CASES[name]}, np.float32, SINGLE)


@pytest.mark.thorough(except_for=["adam-all-scheduled-40-33"])
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("first_step", "start_step"), [(40, 40), (40, 33), (40, 0)])
@pytest.mark.parametrize(
    "name", ["adam", "adam-all-scheduled", "rmsprop-centered-scheduled", "ftrl-everything"]
)
def test_age_counts_from_start_step(name, first_step, start_step):
    check({name: CASES[name]}, np.float64, EXACT, first_step, start_step)


@pytest.mark.usefixtures("x64")
def test_adam_bias_correction_at_a_large_age():
    """β2^t is computed as a power of the step, so that it is as precise at age ten million as at
    age ten."""
    p, g = np.array([1.0]), np.array([0.5])
    optimizer = jstep.adam(0.1, 0.9, 1 - 1e-7)
    state = jstep.TrainState.create({"w": p}, optimizer).replace(
        global_step=jstep.create_global_step(10**7)
    )
    new = jstep.apply_gradients(state, {"w": g}, optimizer)
    h = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 1 - 1e-7, "epsilon": 1e-8}
    expected, _ = reference.adam(g, p, {"m": np.zeros(1), "v": np.zeros(1)}, h, 10**7 + 1)
    np.testing.assert_allclose(new.params["w"], expected, rtol=1e-7)


def test_float32_adam_keeps_one_minus_beta2_exact():
    """In float32, 1 − 0.999 is wrong by 5e-5; the slots must not be."""
    optimizer = jstep.adam(0.1)
    state = jstep.apply_gradients(
        jstep.TrainState.create({"w": np.float32(1)}, optimizer), {"w": np.float32(1)}, optimizer
    )
    np.testing.assert_allclose(state.slots["v"]["w"], 0.001, rtol=2e-7)
    np.testing.assert_allclose(state.slots["m"]["w"], 0.1, rtol=2e-7)
    np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-6)


# Computed by hand from the equations, which checks the reference too.
def test_first_updates_computed_by_hand():
    one = {"w": np.float32(1)}

    def first(optimizer):
        state = jstep.TrainState.create(one, optimizer)
        return float(jstep.apply_gradients(state, {"w": np.float32(2)}, optimizer).params["w"])

    assert first(jstep.gradient_descent(0.25)) == 0.5
    assert first(jstep.momentum(0.25, 0.5)) == 0.5
    assert first(jstep.momentum(0.25, 0.5, use_nesterov=True)) == 0.25  # 1 − ¼·(2 + ½·2)
    assert first(jstep.adagrad(0.25, 5.0)) == pytest.approx(1 - 0.25 * 2 / 3, rel=1e-6)
    # t = 1: m̂/√v̂ = sign(g) up to epsilon, which weighs 1/√(1 − β2) more than in the paper's other
    # form.
    assert first(jstep.adam(0.25, epsilon=0.0)) == pytest.approx(0.75, rel=1e-6)
    assert first(jstep.adam(0.25, beta2=0.75, epsilon=1.0)) == pytest.approx(
        1 - 0.25 * 0.5 * 2 / (1 + 1), rel=1e-6
    )
    assert first(jstep.rmsprop(0.25, decay=0.5)) == pytest.approx(1 - 0.25 * 2 / 2.5**0.5, rel=1e-6)
    assert first(jstep.rmsprop(0.25, decay=0.5, centered=True)) == pytest.approx(
        1 - 0.25 * 2 / 1.5**0.5, rel=1e-6
    )
    # a' = 9, a = 5, lr = 1: linear = 2 − (3 − √5); p = −linear / 3.
    assert first(jstep.ftrl(1.0, initial_accumulator_value=5.0)) == pytest.approx(
        -(2 - (3 - 5**0.5)) / 3, rel=1e-6
    )
