"""Trajectories of every optimizer against the equations, written out in NumPy float64 (tests/reference.py)."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jstep

STEPS = 12
SHAPES = {"a": (3,), "b": {"c": (2, 2), "d": ()}}
# Schedules written out, so that both sides read the same numbers and neither computes them.
FALLING = np.linspace(0.3, 0.05, 64)
RISING = np.linspace(0.5, 0.95, 64)


class Case(NamedTuple):
    make: Callable[..., jstep.Optimizer]
    rule: reference.Rule
    slots: dict[str, float]
    hyper: dict[str, Any]
    """Every hyperparameter by name; an array is a schedule. What is not in `defaults` is passed by keyword."""
    static: Mapping[str, Any] = MappingProxyType({})
    defaults: tuple[str, ...] = ()


FTRL = {
    "learning_rate": 0.3,
    "learning_rate_power": -0.5,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
    "beta": 0.0,
}
ADAM = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
RMSPROP = {"learning_rate": 0.1, "decay": 0.9, "momentum": 0.0, "epsilon": 1e-10}
RMS = {"rms": 1.0, "momentum": 0.0}


def ftrl_case(accum: float = 0.1, **changes: Any) -> Case:
    return Case(
        jstep.ftrl,
        reference.ftrl,
        {"accum": accum, "linear": 0.0},
        FTRL | changes,
        {"initial_accumulator_value": accum},
    )


CASES = {
    "gradient_descent": Case(jstep.gradient_descent, reference.gradient_descent, {}, {"learning_rate": 0.1}),
    "gradient_descent-scheduled": Case(
        jstep.gradient_descent, reference.gradient_descent, {}, {"learning_rate": FALLING}
    ),
    "momentum": Case(jstep.momentum, reference.momentum, {"momentum": 0.0}, {"learning_rate": 0.1, "momentum": 0.9}),
    "momentum-scheduled": Case(
        jstep.momentum, reference.momentum, {"momentum": 0.0}, {"learning_rate": FALLING, "momentum": RISING}
    ),
    "nesterov": Case(
        jstep.momentum,
        reference.nesterov,
        {"momentum": 0.0},
        {"learning_rate": 0.1, "momentum": 0.9},
        {"use_nesterov": True},
    ),
    "nesterov-scheduled": Case(
        jstep.momentum,
        reference.nesterov,
        {"momentum": 0.0},
        {"learning_rate": FALLING, "momentum": RISING},
        {"use_nesterov": True},
    ),
    "adagrad-defaults": Case(jstep.adagrad, reference.adagrad, {"accumulator": 0.1}, {"learning_rate": 0.2}),
    "adagrad": Case(
        jstep.adagrad,
        reference.adagrad,
        {"accumulator": 0.7},
        {"learning_rate": FALLING},
        {"initial_accumulator_value": 0.7},
    ),
    "adam-defaults": Case(jstep.adam, reference.adam, {"m": 0.0, "v": 0.0}, ADAM, defaults=tuple(ADAM)),
    "adam": Case(
        jstep.adam,
        reference.adam,
        {"m": 0.0, "v": 0.0},
        {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 0.1},
    ),
    "adam-no-averaging": Case(jstep.adam, reference.adam, {"m": 0.0, "v": 0.0}, ADAM | {"beta1": 0.0, "beta2": 0.0}),
    "adam-rate-scheduled": Case(jstep.adam, reference.adam, {"m": 0.0, "v": 0.0}, ADAM | {"learning_rate": FALLING}),
    "adam-all-scheduled": Case(
        jstep.adam,
        reference.adam,
        {"m": 0.0, "v": 0.0},
        {"learning_rate": FALLING, "beta1": RISING, "beta2": RISING, "epsilon": FALLING},
    ),
    "rmsprop-defaults": Case(jstep.rmsprop, reference.rmsprop, RMS, RMSPROP, defaults=("decay", "momentum", "epsilon")),
    "rmsprop": Case(
        jstep.rmsprop,
        reference.rmsprop,
        RMS,
        {"learning_rate": 0.05, "decay": 0.7, "momentum": 0.6, "epsilon": 0.01},
    ),
    "rmsprop-scheduled": Case(
        jstep.rmsprop,
        reference.rmsprop,
        RMS,
        {"learning_rate": FALLING, "decay": RISING, "momentum": RISING, "epsilon": FALLING},
    ),
    "rmsprop-centered": Case(
        jstep.rmsprop,
        reference.rmsprop_centered,
        RMS | {"mg": 0.0},
        {"learning_rate": 0.05, "decay": 0.7, "momentum": 0.6, "epsilon": 0.01},
        {"centered": True},
    ),
    "rmsprop-centered-scheduled": Case(
        jstep.rmsprop,
        reference.rmsprop_centered,
        RMS | {"mg": 0.0},
        {"learning_rate": FALLING, "decay": RISING, "momentum": RISING, "epsilon": FALLING},
        {"centered": True},
    ),
    "ftrl-defaults": Case(jstep.ftrl, reference.ftrl, {"accum": 0.1, "linear": 0.0}, FTRL, defaults=tuple(FTRL)[1:]),
    "ftrl-rate-scheduled": ftrl_case(learning_rate=FALLING),
    "ftrl-power": ftrl_case(learning_rate_power=-0.8),
    "ftrl-power-scheduled": ftrl_case(learning_rate_power=-RISING),
    "ftrl-fixed-rate": ftrl_case(learning_rate_power=0.0),
    "ftrl-accum-zero": ftrl_case(accum=0.0),
    "ftrl-l1": ftrl_case(l1_regularization_strength=0.9),
    "ftrl-l2": ftrl_case(l2_regularization_strength=0.4),
    "ftrl-shrinkage": ftrl_case(l2_shrinkage_regularization_strength=0.2),
    "ftrl-beta": ftrl_case(beta=0.7),
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


def written_out(table: np.ndarray) -> Callable[[Any], jax.Array]:
    return lambda step: jnp.asarray(table)[step]


def build(case: Case) -> jstep.Optimizer:
    given = {name: value for name, value in case.hyper.items() if name not in case.defaults}
    return case.make(
        **{name: written_out(v) if isinstance(v, np.ndarray) else v for name, v in given.items()}, **case.static
    )


def random_tree(rng: np.random.Generator, dtype: Any) -> Any:
    return jax.tree.map(
        lambda shape: np.asarray(rng.normal(size=shape)).astype(dtype), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def run(optimizer: jstep.Optimizer, params: Any, gradients: list[Any], first_step: int, start_step: int) -> Any:
    state = jstep.TrainState.create(params, optimizer, start_step)
    state = state.replace(global_step=jstep.create_global_step(first_step))
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
    path = []
    for grads in gradients:
        state = step(state, grads)
        path.append(state.params)
    return state, path


def check(case: Case, dtype: Any, tolerance: dict[str, float], first_step: int, start_step: int) -> None:
    rng = np.random.default_rng(7)
    params = random_tree(rng, dtype)
    gradients = [random_tree(rng, dtype) for _ in range(STEPS)]
    state, path = run(build(case), params, gradients, first_step, start_step)

    assert int(state.global_step) == first_step + STEPS
    for i, leaf in enumerate(jax.tree.leaves(params)):
        expected, slots = reference.trajectory(
            case.rule,
            case.slots,
            leaf,
            [jax.tree.leaves(g)[i] for g in gradients],
            case.hyper,
            first_step=first_step,
            start_step=start_step,
        )
        for n, tree in enumerate(path):
            found = jax.tree.leaves(tree)[i]
            assert found.dtype == dtype
            np.testing.assert_allclose(found, expected[n], **tolerance, err_msg=f"params after {n + 1} updates")
        assert sorted(slots) == jstep.get_slot_names(state)
        for name, value in slots.items():
            np.testing.assert_allclose(
                jax.tree.leaves(state.slots[name])[i], value, **tolerance, err_msg=f"slot {name}"
            )


EXACT = {"rtol": 1e-11, "atol": 1e-13}
SINGLE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CASES)
def test_trajectory_in_float64(name: str) -> None:
    check(CASES[name], np.float64, EXACT, first_step=0, start_step=0)


@pytest.mark.parametrize("name", CASES)
def test_trajectory_in_float32(name: str) -> None:
    check(CASES[name], np.float32, SINGLE, first_step=0, start_step=0)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("first_step", "start_step"), [(40, 40), (40, 33), (40, 0)])
@pytest.mark.parametrize("name", ["adam", "adam-all-scheduled", "rmsprop-centered-scheduled", "ftrl-everything"])
def test_age_counts_from_start_step(name: str, first_step: int, start_step: int) -> None:
    check(CASES[name], np.float64, EXACT, first_step, start_step)


def test_fresh_adam_slots_at_a_late_step_are_corrected_as_fresh() -> None:
    rng = np.random.default_rng(0)
    params, gradients = random_tree(rng, np.float32), [random_tree(rng, np.float32) for _ in range(3)]
    _, early = run(jstep.adam(0.1), params, gradients, 0, 0)
    _, late = run(jstep.adam(0.1), params, gradients, 10_000, 10_000)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), early, late))


@pytest.mark.usefixtures("x64")
def test_adam_correction_at_a_great_age() -> None:
    """β2^t computed as a power of the step: an age of ten million is no harder than an age of ten."""
    p, g = np.array([1.0]), np.array([0.5])
    optimizer = jstep.adam(0.1, 0.9, 1 - 1e-7)
    state = jstep.TrainState.create({"w": p}, optimizer).replace(global_step=jstep.create_global_step(10**7))
    new = jstep.apply_gradients(state, {"w": g}, optimizer)
    h = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 1 - 1e-7, "epsilon": 1e-8}
    expected, _ = reference.adam(g, p, {"m": np.zeros(1), "v": np.zeros(1)}, h, 10**7 + 1)
    np.testing.assert_allclose(new.params["w"], expected, rtol=1e-7)


def test_float32_adam_keeps_one_minus_beta2_exact() -> None:
    """1 − 0.999 in float32 is wrong by 5e-5; the slots must not be."""
    optimizer = jstep.adam(0.1)
    state = jstep.apply_gradients(
        jstep.TrainState.create({"w": np.float32(1)}, optimizer), {"w": np.float32(1)}, optimizer
    )
    np.testing.assert_allclose(state.slots["v"]["w"], 0.001, rtol=2e-7)
    np.testing.assert_allclose(state.slots["m"]["w"], 0.1, rtol=2e-7)
    np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-6)


# By hand, from the equations alone: the reference is checked too.
def test_first_updates_worked_by_hand() -> None:
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


# Sparse gradients.

TABLE = (6, 2)
ROWS_ONLY = [name for name in CASES if not name.startswith("adam")]
INDICES = [[4, 1], [1, 1, 4], [5], [0, 5, 0, 5, 0], [2, 3], [], [4, 4]]


def sparse_gradients(rng: np.random.Generator, dtype: Any) -> list[tuple[np.ndarray, list[int]]]:
    return [(rng.normal(size=(len(i), TABLE[1])).astype(dtype), i) for i in INDICES]


def sparse_run(optimizer: jstep.Optimizer, params: Any, gradients: Any, *, traced: bool) -> jstep.TrainState:
    state = jstep.TrainState.create({"table": params}, optimizer)

    def step(state: jstep.TrainState, rows: Any, indices: Any) -> jstep.TrainState:
        return jstep.apply_gradients(state, {"table": jstep.IndexedSlices(rows, indices, TABLE)}, optimizer)

    if traced:
        step = jax.jit(step)
    for rows, indices in gradients:
        state = step(state, jnp.asarray(rows), jnp.asarray(indices, jnp.int32))
    return state


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ROWS_ONLY)
def test_sparse_gradients_touch_their_rows_alone(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(3)
    p = rng.normal(size=TABLE)
    gradients = sparse_gradients(rng, np.float64)
    state = sparse_run(build(case), p, gradients, traced=True)

    slots = {k: np.full(TABLE, v) for k, v in case.slots.items()}
    for n, (rows, indices) in enumerate(gradients):
        if indices:
            p, slots = reference.sparse_update(
                case.rule, rows, indices, p, slots, reference.values(case.hyper, n), n + 1
            )
    np.testing.assert_allclose(state.params["table"], p, **EXACT)
    for slot, value in slots.items():
        np.testing.assert_allclose(state.slots[slot]["table"], value, **EXACT, err_msg=slot)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("adam")])
def test_sparse_adam_is_dense_adam(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(3)
    p = rng.normal(size=TABLE)
    gradients = sparse_gradients(rng, np.float64)
    state = sparse_run(build(case), p, gradients, traced=True)
    path, slots = reference.trajectory(
        case.rule, case.slots, p, [reference.dense(rows, indices, TABLE) for rows, indices in gradients], case.hyper
    )
    np.testing.assert_allclose(state.params["table"], path[-1], **EXACT)
    for slot, value in slots.items():
        np.testing.assert_allclose(state.slots[slot]["table"], value, **EXACT, err_msg=slot)


@pytest.mark.parametrize("name", ["gradient_descent", "nesterov", "adagrad", "adam", "rmsprop-centered", "ftrl-l1"])
def test_sparse_gradients_with_concrete_indices(name: str) -> None:
    rng = np.random.default_rng(5)
    p, gradients = rng.normal(size=TABLE).astype(np.float32), sparse_gradients(rng, np.float32)
    eager, traced = (sparse_run(build(CASES[name]), p, gradients, traced=traced) for traced in (False, True))
    np.testing.assert_allclose(eager.params["table"], traced.params["table"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gradient_descent", "momentum", "adagrad", "rmsprop", "ftrl-l1"])
def test_rows_that_are_not_named_keep_their_bits(name: str) -> None:
    p = np.random.default_rng(6).normal(size=TABLE).astype(np.float32)
    optimizer = build(CASES[name])
    before = jstep.TrainState.create({"table": p}, optimizer)
    rows = jnp.ones((2, TABLE[1]))
    after = sparse_run(optimizer, p, [(rows, [2, 2])], traced=True)
    others = np.array([0, 1, 3, 4, 5])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if np.ndim(old):
            np.testing.assert_array_equal(np.asarray(old)[others], np.asarray(new)[others])


@pytest.mark.parametrize("name", ["gradient_descent", "momentum", "adagrad", "adam", "rmsprop", "ftrl-l1"])
def test_traced_indices_out_of_range_are_dropped(name: str) -> None:
    rng = np.random.default_rng(8)
    p = rng.normal(size=TABLE).astype(np.float32)
    rows = rng.normal(size=(5, TABLE[1])).astype(np.float32)
    optimizer = build(CASES[name])
    with_strays = sparse_run(optimizer, p, [(rows, [6, 1, -1, 1, 2**31 - 1])], traced=True)
    without = sparse_run(optimizer, p, [(rows[[1, 3]], [1, 1])], traced=True)
    for a, b in zip(jax.tree.leaves(with_strays), jax.tree.leaves(without), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
