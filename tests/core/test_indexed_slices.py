"""`IndexedSlices`: sparse gradients as a pytree of rows."""

from typing import Any

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from thorough import examples

import jstep


def slices(n: int = 3) -> jstep.IndexedSlices:
    return jstep.IndexedSlices(jnp.arange(2.0 * n).reshape(n, 2), jnp.arange(n), (5, 2))


def test_indexed_slices_are_a_pytree() -> None:
    leaves, treedef = jax.tree.flatten(slices())
    assert [leaf.shape for leaf in leaves] == [(3, 2), (3,)]
    assert jax.tree.unflatten(treedef, leaves).dense_shape == (5, 2)
    doubled = jax.jit(lambda s: jstep.IndexedSlices(2 * s.values, s.indices, s.dense_shape))(slices())
    np.testing.assert_array_equal(doubled.values, 2 * slices().values)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), slices(), slices())  # for scan_steps
    assert stacked.values.shape == (2, 3, 2)
    assert jax.eval_shape(slices).dense_shape == (5, 2)
    paths = [jax.tree_util.keystr(k, simple=True) for k, _ in jax.tree_util.tree_leaves_with_path(slices())]
    assert paths == ["values", "indices"]


@examples(30)
@given(
    st.sampled_from([0, 1, 6]).flatmap(lambda size: st.lists(st.integers(0, 4), min_size=size, max_size=size)),
    hnp.arrays(np.float32, (6, 2), elements=st.floats(-100, 100, width=16)),
)
def test_to_dense_adds_repeated_rows(indices: list[int], rows: np.ndarray) -> None:
    rows = rows[: len(indices)]
    sparse = jstep.IndexedSlices(rows, np.array(indices, np.int32), (5, 2))
    np.testing.assert_allclose(sparse.to_dense(), reference.dense(rows, indices, (5, 2)), rtol=1e-6, atol=1e-5)


def test_low_precision_rows_are_added_in_float32() -> None:
    rows, indices = jnp.ones((600, 1), jnp.bfloat16), jnp.zeros(600, jnp.int32)
    dense = jstep.IndexedSlices(rows, indices, (2, 1)).to_dense()
    np.testing.assert_array_equal(dense, [[600.0], [0.0]])  # a bfloat16 sum stops at 256


@pytest.mark.thorough(except_for=["int8", "uint32"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int32])
def test_indices_of_any_integer_dtype(dtype: Any) -> None:
    table = (200 if dtype != np.int8 else 100, 1)
    sparse = jstep.IndexedSlices(jnp.ones((3, 1)), jnp.array([99, 99, 0], dtype), table)
    dense = np.zeros(table)
    dense[[99, 0]] = [[2.0], [1.0]]
    np.testing.assert_array_equal(sparse.to_dense(), dense)
    np.testing.assert_array_equal(jax.jit(lambda s: s.to_dense())(sparse), dense)


@pytest.mark.thorough
def test_tables_of_any_rank() -> None:
    vector = jstep.IndexedSlices(jnp.ones(2), jnp.array([1, 1]), (3,))
    np.testing.assert_array_equal(vector.to_dense(), [0.0, 2.0, 0.0])
    cube = jstep.IndexedSlices(jnp.ones((1, 2, 3)), jnp.array([1]), (2, 2, 3))
    assert cube.to_dense().shape == (2, 2, 3)
    lists = jstep.IndexedSlices([[1.0]], [2], [3, 1])
    np.testing.assert_array_equal(lists.to_dense(), [[0.0], [0.0], [1.0]])
    optimizer = jstep.adagrad(0.1)
    state = jstep.TrainState.create({"v": jnp.zeros(3), "c": jnp.zeros((2, 2, 3))}, optimizer)
    state = jstep.apply_gradients(state, {"v": vector, "c": cube}, optimizer)
    assert float(state.params["v"][1]) < 0
    assert not np.any(state.params["c"][0])


def test_indices_out_of_range_raise_or_are_dropped_under_jit() -> None:
    for index in (5, -1):
        bad = jstep.IndexedSlices(jnp.ones((2, 2)), jnp.array([0, index]), (5, 2))
        with pytest.raises(ValueError, match=rf"{index}.*5 rows"):
            bad.to_dense()
        optimizer = jstep.gradient_descent(1.0)
        state = jstep.TrainState.create({"t": jnp.zeros((5, 2))}, optimizer)
        with pytest.raises(ValueError, match=rf"'t'.*{index}.*5 rows"):
            jstep.apply_gradients(state, {"t": bad}, optimizer)
        dense = jax.jit(lambda s: s.to_dense())(bad)
        np.testing.assert_array_equal(dense, [[1, 1], [0, 0], [0, 0], [0, 0], [0, 0]])
        after = jax.jit(lambda s, g, o=optimizer: jstep.apply_gradients(s, g, o))(state, {"t": bad})
        np.testing.assert_array_equal(after.params["t"], -dense)


def test_slices_are_one_leaf_in_an_error_about_structures() -> None:
    state = jstep.TrainState.create({"t": jnp.zeros((5, 2)), "w": 1.0}, jstep.gradient_descent(1.0))
    with pytest.raises(ValueError, match=r"not have the structure of params; missing: 'w'\. Give gradients"):
        jstep.apply_gradients(state, {"t": slices()}, jstep.gradient_descent(1.0))


def test_dropped_rows_do_not_contribute_to_norms() -> None:
    bad = jstep.IndexedSlices(jnp.array([[3.0], [4.0], [100.0]]), jnp.array([0, 1, 9]), (5, 1))
    assert float(jax.jit(jstep.global_norm)(bad)) == 5.0


@pytest.mark.parametrize("make", [jstep.adam, lambda: jstep.adagrad(0.1), lambda: jstep.ftrl(0.1)])
def test_low_precision_tables(make: Any) -> None:
    optimizer = make()
    table, rows = jnp.ones((5, 2), jnp.bfloat16), jnp.ones((3, 2), jnp.bfloat16)
    state = jstep.TrainState.create({"t": table}, optimizer)
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))
    sparse = step(state, {"t": jstep.IndexedSlices(rows, jnp.array([1, 1, 3]), (5, 2))})
    touched = np.array([1, 3])
    dense = step(state, {"t": jnp.zeros((5, 2)).at[jnp.array([1, 3])].set(jnp.array([[2.0], [1.0]]))})
    assert sparse.params["t"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        sparse.params["t"].astype(jnp.float32)[touched], dense.params["t"].astype(jnp.float32)[touched]
    )


def test_sparse_gradients_in_nested_optimizers() -> None:
    rows = jstep.IndexedSlices(jnp.array([[3.0], [4.0]]), jnp.array([0, 2]), (4, 1))
    optimizer = jstep.skip_nonfinite(
        jstep.with_moving_average(
            jstep.chain(
                jstep.clip_gradients(by_global_norm=1.0),
                jstep.partition(
                    {"table": jstep.gradient_descent(1.0), "rest": jstep.adam()},
                    lambda path, leaf: "table" if path == "t" else "rest",
                ),
            ),
            jstep.ExponentialMovingAverage(0.5),
        )
    )
    state = jstep.TrainState.create({"t": jnp.zeros((4, 1)), "w": 0.0}, optimizer)
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))
    new = step(state, {"t": rows, "w": jnp.float32(0)})
    np.testing.assert_allclose(new.params["t"], [[-0.6], [0], [-0.8], [0]], rtol=1e-6)
    np.testing.assert_allclose(jstep.averaged_params(new)["t"], [[-0.3], [0], [-0.4], [0]], rtol=1e-6)
    bad = jstep.IndexedSlices(jnp.array([[jnp.nan]]), jnp.array([0]), (4, 1))
    skipped = step(new, {"t": bad, "w": jnp.float32(1)})
    for a, b in zip(jax.tree.leaves(skipped.params), jax.tree.leaves(new.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert jstep.global_step(skipped) == 2


@pytest.mark.thorough(except_for=["uint8-256"])
@pytest.mark.parametrize(
    ("dtype", "rows"), [(np.uint8, 256), (np.uint8, 300), (np.int8, 128), (np.int8, 200), (np.uint16, 65536)]
)
def test_indices_of_a_dtype_that_cannot_hold_the_number_of_rows(dtype: Any, rows: int) -> None:
    sparse = jstep.IndexedSlices(jnp.ones((3, 1)), jnp.array([99, 3, 99], dtype), (rows, 1))
    for dense in (sparse.to_dense(), jax.jit(lambda s: s.to_dense())(sparse)):
        assert np.flatnonzero(np.asarray(dense)[:, 0]).tolist() == [3, 99]
    optimizer = jstep.adagrad(1.0)
    state = jstep.TrainState.create({"e": jnp.zeros((rows, 1))}, optimizer)
    state = jstep.apply_gradients(state, {"e": sparse}, optimizer)
    assert np.flatnonzero(np.asarray(state.params["e"])[:, 0]).tolist() == [3, 99]
    np.testing.assert_allclose(jstep.global_norm({"e": sparse}), 5**0.5, rtol=1e-6)
