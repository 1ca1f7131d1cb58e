"""`IndexedSlices`: sparse gradients as a pytree of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.core.jaxprs import evaluate_on_slices, is_elementwise, trace_inlined
from jstep.slots import indexed_slices


def slices(n=3):
    return jstep.IndexedSlices(jnp.arange(2.0 * n).reshape(n, 2), jnp.arange(n), (5, 2))


def test_indexed_slices_are_a_pytree():
    leaves, treedef = jax.tree.flatten(slices())
    assert [leaf.shape for leaf in leaves] == [(3, 2), (3,)]
    assert jax.tree.unflatten(treedef, leaves).dense_shape == (5, 2)
    double = jax.jit(lambda s: jstep.IndexedSlices(2 * s.values, s.indices, s.dense_shape))
    doubled = double(slices())
    np.testing.assert_array_equal(doubled.values, 2 * slices().values)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), slices(), slices())  # for scan_steps
    assert stacked.values.shape == (2, 3, 2)
    assert jax.eval_shape(slices).dense_shape == (5, 2)
    paths = [
        jax.tree_util.keystr(k, simple=True)
        for k, _ in jax.tree_util.tree_leaves_with_path(slices())
    ]
    assert paths == ["values", "indices"]


@pytest.mark.thorough
def test_low_precision_rows_are_added_in_float32():
    rows, indices = jnp.ones((600, 1), jnp.bfloat16), jnp.zeros(600, jnp.int32)
    dense = jstep.IndexedSlices(rows, indices, (2, 1)).to_dense()
    np.testing.assert_array_equal(dense, [[600.0], [0.0]])  # a bfloat16 sum stops at 256


def test_indices_out_of_range_raise_or_are_dropped_under_jit():
    for index in (5, -1):
        bad = jstep.IndexedSlices(jnp.ones((2, 2)), jnp.array([0, index]), (5, 2))
        with pytest.raises(ValueError, match=rf"< 5, got {index}"):
            bad.to_dense()
        optimizer = jstep.gradient_descent(1.0)
        state = jstep.TrainState.create({"t": jnp.zeros((5, 2))}, optimizer)
        with pytest.raises(ValueError, match=rf"'t'.*< 5, got {index}"):
            jstep.apply_gradients(state, {"t": bad}, optimizer)
        dense = jax.jit(lambda s: s.to_dense())(bad)
        np.testing.assert_array_equal(dense, [[1, 1], [0, 0], [0, 0], [0, 0], [0, 0]])
        after = jax.jit(lambda s, g, o=optimizer: jstep.apply_gradients(s, g, o))(state, {"t": bad})
        np.testing.assert_array_equal(after.params["t"], -dense)


def test_dropped_rows_do_not_contribute_to_norms():
    bad = jstep.IndexedSlices(jnp.array([[3.0], [4.0], [100.0]]), jnp.array([0, 1, 9]), (5, 1))
    assert float(jax.jit(jstep.global_norm)(bad)) == 5.0


@pytest.mark.thorough
def test_low_precision_tables():
    optimizer = jstep.adam()
    table, rows = jnp.ones((5, 2), jnp.bfloat16), jnp.ones((3, 2), jnp.bfloat16)
    state = jstep.TrainState.create({"t": table}, optimizer)
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))
    sparse = step(state, {"t": jstep.IndexedSlices(rows, jnp.array([1, 1, 3]), (5, 2))})
    touched = np.array([1, 3])
    dense = step(
        state, {"t": jnp.zeros((5, 2)).at[jnp.array([1, 3])].set(jnp.array([[2.0], [1.0]]))}
    )
    assert sparse.params["t"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        sparse.params["t"].astype(jnp.float32)[touched],
        dense.params["t"].astype(jnp.float32)[touched],
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "rows"), [(np.uint8, 256), (np.int8, 128), (np.uint16, 65536)])
def test_indices_of_a_dtype_that_cannot_hold_the_number_of_rows(dtype, rows):
    sparse = jstep.IndexedSlices(jnp.ones((3, 1)), jnp.array([99, 3, 99], dtype), (rows, 1))
    for dense in (sparse.to_dense(), jax.jit(lambda s: s.to_dense())(sparse)):
        assert np.flatnonzero(np.asarray(dense)[:, 0]).tolist() == [3, 99]
    optimizer = jstep.adagrad(1.0)
    state = jstep.TrainState.create({"e": jnp.zeros((rows, 1))}, optimizer)
    state = jstep.apply_gradients(state, {"e": sparse}, optimizer)
    assert np.flatnonzero(np.asarray(state.params["e"])[:, 0]).tolist() == [3, 99]
    np.testing.assert_allclose(jstep.global_norm({"e": sparse}), 5**0.5, rtol=1e-6)


# Elementwise programs, evaluated on parts of their arrays; slices that users type as lists, and
# rows in order.

SHAPE = (4, 3)


def elementwise(x, y):
    """A call, a scalar of each shape, and a broadcast."""
    return jax.jit(lambda z: jnp.where(z > 0.0, jnp.sqrt(jnp.abs(z)), jnp.zeros_like(z)))(
        x * 2.0 + y
    )


def test_a_part_of_an_elementwise_program_is_the_part_of_its_result():
    x, y = jnp.arange(-6.0, 6.0).reshape(SHAPE), jnp.full(SHAPE, 0.5)
    body, _ = trace_inlined(elementwise, "cpu", x, y)
    assert is_elementwise(body, SHAPE)
    (found,) = evaluate_on_slices(body, [x[1:3], y[1:3]], (2, 3))
    assert found.shape == (2, 3)
    np.testing.assert_array_equal(found, elementwise(x, y)[1:3])


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: x + y, True),
        (lambda x, y: x + jnp.ones(SHAPE), True),
        (lambda x, y: x + jnp.sum(y), False),
        (lambda x, y: x.T, False),
        (lambda x, y: x + jnp.ones((1, 3)), False),
        (lambda x, y: jnp.cumsum(x, 0), False),
        (lambda x, y: jnp.broadcast_to(jnp.float32(2), SHAPE) * x, True),
    ],
)
def test_what_is_elementwise(fn, expected):
    body, _ = trace_inlined(fn, "cpu", jnp.ones(SHAPE), jnp.ones(SHAPE))
    assert is_elementwise(body, SHAPE) is expected


def test_rows_in_order():
    values = jnp.arange(8.0).reshape(4, 2)
    rows = indexed_slices.rows_in_order(values, jnp.array([False, True, False, True]))
    assert rows.indices.tolist() == [1, 1, 1, 3]
    assert rows.values.tolist() == [[0, 0], [2, 3], [0, 0], [6, 7]]
    assert rows.to_dense().tolist() == [[0, 0], [2, 3], [0, 0], [6, 7]]
    none = indexed_slices.rows_in_order(values, jnp.zeros(4, bool))
    assert (none.values.shape, none.indices.shape, none.dense_shape) == ((0, 2), (0,), (4, 2))
    assert none.to_dense().tolist() == [[0, 0]] * 4
    traced = jax.jit(indexed_slices.rows_in_order)(values, jnp.zeros(4, bool))
    assert traced.indices.tolist() == [4, 4, 4, 4]  # out of range, so that nothing is named
    assert indexed_slices.map_table(lambda table: table * 2, jnp.ones(2)).tolist() == [2, 2]


def test_slices_of_lists_are_arrays():
    slices = jstep.IndexedSlices([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1, 1, 3], (np.int64(4), 2))
    assert isinstance(slices.values, jax.Array)
    assert isinstance(slices.indices, jax.Array)
    assert slices.dense_shape == (4, 2)
    assert [type(size) for size in slices.dense_shape] == [int, int]
    assert slices.to_dense().tolist() == [[0, 0], [4, 6], [0, 0], [5, 6]]
