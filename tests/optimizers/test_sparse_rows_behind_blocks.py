"""Sparse gradients behind clips and blocks: rows that no gradient names keep their parameter and slots bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

# Blocks that do not change the gradients below.
BLOCKS = {
    "by value": lambda: jstep.clip_gradients(by_value=(-1e6, 1e6)),
    "by norm": lambda: jstep.clip_gradients(by_norm=1e6),
    "by average norm": lambda: jstep.clip_gradients(by_average_norm=1e6),
    "by global norm": lambda: jstep.clip_gradients(by_global_norm=1e6),
    "scale": lambda: jstep.scale(1.0),
    "two": lambda: jstep.chain(jstep.clip_gradients(by_global_norm=1e6), jstep.clip_gradients(by_value=1e6)),
}
OPTIMIZERS = {
    "gradient_descent": lambda: jstep.gradient_descent(0.1),
    "momentum": lambda: jstep.momentum(0.1, 0.9),
    "nesterov": lambda: jstep.momentum(0.1, 0.9, use_nesterov=True),
    "rmsprop": lambda: jstep.rmsprop(0.1, momentum=0.9, centered=True),
    "adagrad": lambda: jstep.adagrad(0.1),
    "ftrl": lambda: jstep.ftrl(0.1, l1_regularization_strength=0.1),
}
# The first step gives row 0 a moment; repeated indices leave unused entries after their sum.
INDICES = ([0, 2], [3, 3], [4, 4], [3, 0])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.thorough(except_for=["momentum-by norm-compiled", "adagrad-scale-eager"])
def test_only_named_rows_change(name: str, block: str, compiled: bool) -> None:
    plain = OPTIMIZERS[name]()
    optimizer = jstep.chain(BLOCKS[block](), OPTIMIZERS[name]())

    def step(state: Any, rows: Any) -> Any:
        return jstep.apply_gradients(state, {"t": rows}, optimizer)

    step = jax.jit(step) if compiled else step
    state, want = (jstep.TrainState.create({"t": jnp.ones((5, 2))}, one) for one in (optimizer, plain))
    for n, indices in enumerate(INDICES):
        rows = jstep.IndexedSlices(jnp.full((2, 2), 1.0 + n), jnp.array(indices), (5, 2))
        before, state = state, step(state, rows)
        want = jstep.apply_gradients(want, {"t": rows}, plain)
        others = [row for row in range(5) if row not in indices]
        olds, news = (jax.tree.leaves((one.params, one.slots)) for one in (before, state))
        for old, new in zip(olds, news, strict=True):
            if np.ndim(old):
                np.testing.assert_array_equal(np.asarray(new)[others], np.asarray(old)[others])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.params, want.params)


def test_a_lookup_behind_a_clip_matches_tensorflow() -> None:
    optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=1e6), jstep.momentum(1.0, 0.9))
    step = jstep.minimize(lambda p, i: jnp.sum(jstep.lookup(p["t"], i)), optimizer)
    state = jstep.TrainState.create({"t": jnp.ones((4, 1))}, optimizer)
    for ids in ([0, 2], [3, 3]):
        state, _ = step(state, jnp.array(ids))
    assert state.params["t"].ravel().tolist() == [0.0, 1.0, 0.0, -1.0]


def test_traced_indices_out_of_range_change_no_row() -> None:
    optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=1e6), jstep.momentum(1.0, 0.9))
    step = jax.jit(lambda state, rows: jstep.apply_gradients(state, {"t": rows}, optimizer))
    state = jstep.TrainState.create({"t": jnp.ones((4, 1))}, optimizer)
    state = step(state, jstep.IndexedSlices(jnp.ones((2, 1)), jnp.array([0, 1]), (4, 1)))
    after = step(state, jstep.IndexedSlices(jnp.ones((2, 1)), jnp.array([7, -3]), (4, 1)))
    np.testing.assert_array_equal(after.params["t"], state.params["t"])
    np.testing.assert_array_equal(after.slots["momentum"]["t"], state.slots["momentum"]["t"])
