"""Trajectories of the classic optimizers, compared with their equations in NumPy float64 (tests/reference.py)."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
import reference
from classic_cases import CASES, EXACT, Case, build

import jstep

STEPS = 12
SHAPES = {"a": (3,), "b": {"c": (2, 2), "d": ()}}


def random_tree(rng: np.random.Generator, dtype: Any) -> Any:
    return jax.tree.map(
        lambda shape: np.asarray(rng.normal(size=shape)).astype(dtype), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def run(
    optimizers: dict[str, jstep.Optimizer], params: Any, gradients: list[Any], first_step: int, start_step: int
) -> tuple[dict[str, jstep.TrainState], list[dict[str, Any]]]:
    """Return the last state of each optimizer, and the parameters of all after each step, from one program."""
    states = {
        name: jstep.TrainState.create(params, optimizer, start_step).replace(
            global_step=jstep.create_global_step(first_step)
        )
        for name, optimizer in optimizers.items()
    }

    @jax.jit
    def step(states: Any, grads: Any) -> Any:
        return {name: jstep.apply_gradients(state, grads, optimizers[name]) for name, state in states.items()}

    path = []
    for grads in gradients:
        states = step(states, grads)
        path.append({name: state.params for name, state in states.items()})
    return states, path


def check(
    cases: dict[str, Case],
    dtype: Any,
    tolerance: dict[str, float],
    first_step: int = 0,
    start_step: int = 0,
) -> None:
    rng = np.random.default_rng(7)
    params = random_tree(rng, dtype)
    gradients = [random_tree(rng, dtype) for _ in range(STEPS)]
    states, path = run({name: build(case) for name, case in cases.items()}, params, gradients, first_step, start_step)

    for (name, case), (i, leaf) in itertools.product(cases.items(), enumerate(jax.tree.leaves(params))):
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
            np.testing.assert_allclose(found, expected[n], **tolerance, err_msg=f"{name} after {n + 1} updates")
        assert sorted(slots) == jstep.get_slot_names(states[name])
        for slot, value in slots.items():
            np.testing.assert_allclose(
                jax.tree.leaves(states[name].slots[slot])[i], value, **tolerance, err_msg=f"slot {slot} of {name}"
            )


SINGLE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("part", range(4))
def test_trajectories_in_float64(part: int) -> None:
    check({name: CASES[name] for name in sorted(CASES)[part::4]}, np.float64, EXACT)


@pytest.mark.thorough(except_for=["ftrl-everything-scheduled"])
@pytest.mark.parametrize("name", CASES)
def test_trajectory_in_float32(name: str) -> None:
    check({name: CASES[name]}, np.float32, SINGLE)


@pytest.mark.thorough(except_for=["adam-all-scheduled-40-33"])
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("first_step", "start_step"), [(40, 40), (40, 33), (40, 0)])
@pytest.mark.parametrize("name", ["adam", "adam-all-scheduled", "rmsprop-centered-scheduled", "ftrl-everything"])
def test_age_counts_from_start_step(name: str, first_step: int, start_step: int) -> None:
    check({name: CASES[name]}, np.float64, EXACT, first_step, start_step)


@pytest.mark.usefixtures("x64")
def test_adam_bias_correction_at_a_large_age() -> None:
    """β2^t is computed as a power of the step, so that it is as precise at age ten million as at age ten."""
    p, g = np.array([1.0]), np.array([0.5])
    optimizer = jstep.adam(0.1, 0.9, 1 - 1e-7)
    state = jstep.TrainState.create({"w": p}, optimizer).replace(global_step=jstep.create_global_step(10**7))
    new = jstep.apply_gradients(state, {"w": g}, optimizer)
    h = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 1 - 1e-7, "epsilon": 1e-8}
    expected, _ = reference.adam(g, p, {"m": np.zeros(1), "v": np.zeros(1)}, h, 10**7 + 1)
    np.testing.assert_allclose(new.params["w"], expected, rtol=1e-7)


def test_float32_adam_keeps_one_minus_beta2_exact() -> None:
    """In float32, 1 − 0.999 is wrong by 5e-5; the slots must not be."""
    optimizer = jstep.adam(0.1)
    state = jstep.apply_gradients(
        jstep.TrainState.create({"w": np.float32(1)}, optimizer), {"w": np.float32(1)}, optimizer
    )
    np.testing.assert_allclose(state.slots["v"]["w"], 0.001, rtol=2e-7)
    np.testing.assert_allclose(state.slots["m"]["w"], 0.1, rtol=2e-7)
    np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-6)


# Computed by hand from the equations, which checks the reference too.
def test_first_updates_computed_by_hand() -> None:
    one = {"w": np.float32(1)}

    def first(optimizer: jstep.Optimizer) -> float:
        state = jstep.TrainState.create(one, optimizer)
        return float(jstep.apply_gradients(state, {"w": np.float32(2)}, optimizer).params["w"])

    assert first(jstep.gradient_descent(0.25)) == 0.5
    assert first(jstep.momentum(0.25, 0.5)) == 0.5
    assert first(jstep.momentum(0.25, 0.5, use_nesterov=True)) == 0.25  # 1 − ¼·(2 + ½·2)
    assert first(jstep.adagrad(0.25, 5.0)) == pytest.approx(1 - 0.25 * 2 / 3, rel=1e-6)
    # t = 1: m̂/√v̂ = sign(g) up to epsilon, which weighs 1/√(1 − β2) more than in the paper's other form.
    assert first(jstep.adam(0.25, epsilon=0.0)) == pytest.approx(0.75, rel=1e-6)
    assert first(jstep.adam(0.25, beta2=0.75, epsilon=1.0)) == pytest.approx(1 - 0.25 * 0.5 * 2 / (1 + 1), rel=1e-6)
    assert first(jstep.rmsprop(0.25, decay=0.5)) == pytest.approx(1 - 0.25 * 2 / 2.5**0.5, rel=1e-6)
    assert first(jstep.rmsprop(0.25, decay=0.5, centered=True)) == pytest.approx(1 - 0.25 * 2 / 1.5**0.5, rel=1e-6)
    # a' = 9, a = 5, lr = 1: linear = 2 − (3 − √5); p = −linear / 3.
    assert first(jstep.ftrl(1.0, initial_accumulator_value=5.0)) == pytest.approx(-(2 - (3 - 5**0.5)) / 3, rel=1e-6)
