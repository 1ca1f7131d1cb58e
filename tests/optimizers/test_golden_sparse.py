"""Trajectories of the classic optimizers with sparse gradients: rows of a table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from classic_cases import CASES, EXACT, build

import jstep

TABLE = (6, 2)
ROWS_ONLY = [name for name in CASES if not name.startswith("adam")]
# Three lengths, because each one is compiled separately.
INDICES = [[4, 1], [1, 1, 4], [5, 5, 5], [0, 5, 0], [2, 3], [], [4, 4]]


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


@pytest.mark.thorough(except_for=["adagrad", "rmsprop"])
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ROWS_ONLY)
def test_sparse_gradients_update_only_their_rows(name: str) -> None:
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


@pytest.mark.thorough(except_for=["adam-all-scheduled"])
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("adam")])
def test_sparse_adam_equals_dense_adam(name: str) -> None:
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


@pytest.mark.thorough(except_for=["adam"])
@pytest.mark.parametrize("name", ["gradient_descent", "nesterov", "adagrad", "adam", "rmsprop-centered", "ftrl-l1"])
def test_sparse_gradients_with_concrete_indices(name: str) -> None:
    rng = np.random.default_rng(5)
    p, gradients = rng.normal(size=TABLE).astype(np.float32), sparse_gradients(rng, np.float32)
    eager, traced = (sparse_run(build(CASES[name]), p, gradients, traced=traced) for traced in (False, True))
    np.testing.assert_allclose(eager.params["table"], traced.params["table"], rtol=1e-5, atol=1e-6)
