"""Placement of data that was read from storage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import aligned
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jstep.core.placement import Placements, back, local_parts, place, place_anywhere, placements_of, slices


@pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x"), P("y"), P("x", "y"), P(("x", "y"))])
def test_arrays_are_placed_by_parts_and_own_their_memory(spec, memory_kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)
    whole = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    parts = {}
    for part in local_parts(whole.shape, sharding):
        values = whole[slices(part)]
        parts[part] = aligned(values.shape, values.dtype)
        parts[part][...] = values
    placed = place(whole.shape, whole.dtype, sharding, parts)
    assert placed.sharding == sharding
    assert np.array_equal(placed, whole)
    lent = {values.ctypes.data for values in parts.values()}
    own = [shard.data.unsafe_buffer_pointer() for shard in placed.addressable_shards]
    assert len(set(own) - lent) == len(own) == 8


def test_parts_are_distinct_and_cover_the_array():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    assert local_parts((8, 2), None) == [((0, 8), (0, 2))]
    assert local_parts((), NamedSharding(mesh, P())) == [()]
    assert local_parts((0, 8), NamedSharding(mesh, P(None, "x"))) == [((0, 0), (2 * i, 2 * i + 2)) for i in range(4)]
    assert local_parts((8, 2), NamedSharding(mesh, P("y"))) == [((0, 4), (0, 2)), ((4, 8), (0, 2))]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int4, jnp.float8_e4m3fn, bool])
def test_every_dtype_is_placed(dtype):
    values = np.ones(3, dtype)
    sharding = SingleDeviceSharding(jax.devices()[1])
    placed = place((3,), values.dtype, sharding, {((0, 3),): values})
    assert placed.dtype == values.dtype
    assert placed.committed
    assert np.array_equal(placed, values)


def test_arrays_without_a_sharding_are_uncommitted():
    values = aligned((64,), np.float32)
    placed = place_anywhere(values)
    assert not placed.committed
    assert placed.unsafe_buffer_pointer() != values.ctypes.data


def test_arrays_whose_device_jax_may_choose_join_those_that_were_put_on_one():
    first, second = jax.devices()[:2]
    anywhere = jnp.ones(2)
    here, there = jax.device_put(jnp.ones(2), first), jax.device_put(jnp.ones(2), second)
    found = placements_of([anywhere, there, np.ones(2), here, jnp.zeros(3)])
    assert found == Placements([([1, 0, 4], None), ([3], None)], [2])
    assert placements_of([anywhere, np.ones(2)]) == Placements([([0], None)], [1])


def test_an_array_goes_back_to_where_the_one_that_it_replaces_is():
    mesh = jax.make_mesh((8,), ("x",))
    split, there = NamedSharding(mesh, P("x")), NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    made = jnp.arange(8.0)
    for sharding in (split, there):
        found = back(made, jax.device_put(jnp.zeros(8), sharding))
        assert found.sharding == sharding
        np.testing.assert_array_equal(found, made)
        assert back(found, found) is found
    for before in (jnp.zeros(8), np.zeros(8), None):
        assert back(made, before) is made
    assert back(number := np.float32(1), jax.device_put(jnp.zeros(8), split)) is number
