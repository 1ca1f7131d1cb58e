"""Elementwise programs, evaluated on parts of their arrays; slices that users type as lists, and rows in order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.core.jaxprs import is_elementwise, on_slices, without_calls
from jstep.slots import indexed_slices

SHAPE = (4, 3)


def elementwise(x: Any, y: Any) -> Any:
    """A call, a scalar of each shape, and a broadcast."""
    return jax.jit(lambda z: jnp.where(z > 0.0, jnp.sqrt(jnp.abs(z)), jnp.zeros_like(z)))(x * 2.0 + y)


def test_a_part_of_an_elementwise_program_is_the_part_of_its_result() -> None:
    x, y = jnp.arange(-6.0, 6.0).reshape(SHAPE), jnp.full(SHAPE, 0.5)
    body, _ = without_calls(elementwise, "cpu", x, y)
    assert is_elementwise(body, SHAPE)
    (found,) = on_slices(body, [x[1:3], y[1:3]], (2, 3))
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
def test_what_is_elementwise(fn: Any, expected: bool) -> None:
    body, _ = without_calls(fn, "cpu", jnp.ones(SHAPE), jnp.ones(SHAPE))
    assert is_elementwise(body, SHAPE) is expected


def test_rows_in_order() -> None:
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
    assert indexed_slices.on_table(lambda table: table * 2, jnp.ones(2)).tolist() == [2, 2]


def test_slices_of_lists_are_arrays() -> None:
    slices = jstep.IndexedSlices([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1, 1, 3], (np.int64(4), 2))
    assert isinstance(slices.values, jax.Array)
    assert isinstance(slices.indices, jax.Array)
    assert slices.dense_shape == (4, 2)
    assert [type(size) for size in slices.dense_shape] == [int, int]
    assert slices.to_dense().tolist() == [[0, 0], [4, 6], [0, 0], [5, 6]]
