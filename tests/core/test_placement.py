"""Placement of data that was read from storage."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import aligned
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jstep.core.placement import (
    as_memory,
    check_no_shapes,
    check_not_compile_only,
    group_by_devices,
    is_on_host,
    local_parts,
    move_to_devices,
    place,
    place_like_old,
    slices,
)


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
    assert local_parts((0, 8), NamedSharding(mesh, P(None, "x"))) == [
        ((0, 0), (2 * i, 2 * i + 2)) for i in range(4)
    ]
    assert local_parts((8, 2), NamedSharding(mesh, P("y"))) == [((0, 4), (0, 2)), ((4, 8), (0, 2))]


def test_arrays_whose_device_jax_may_choose_join_those_that_were_put_on_one():
    first, second = jax.devices()[:2]
    anywhere = jnp.ones(2)
    here, there = jax.device_put(jnp.ones(2), first), jax.device_put(jnp.ones(2), second)
    found = group_by_devices([anywhere, there, np.ones(2), here, jnp.zeros(3)])
    assert found == ([([1, 0, 4], None), ([3], None)], [2])
    assert group_by_devices([anywhere, np.ones(2)]) == ([([0], None)], [1])


def test_an_array_goes_back_to_where_the_one_that_it_replaces_is():
    mesh = jax.make_mesh((8,), ("x",))
    split, there = (
        NamedSharding(mesh, P("x")),
        NamedSharding(mesh, P("x"), memory_kind="pinned_host"),
    )
    made = jnp.arange(8.0)
    for sharding in (split, there):
        found = place_like_old(made, jax.device_put(jnp.zeros(8), sharding))
        assert found.sharding == sharding
        np.testing.assert_array_equal(found, made)
        assert place_like_old(found, found) is found
    for before in (jnp.zeros(8), np.zeros(8), None):
        assert place_like_old(made, before) is made
    assert place_like_old(number := np.float32(1), jax.device_put(jnp.zeros(8), split)) is number


def test_an_array_in_host_memory_is_moved_to_its_devices_with_or_without_a_program():
    mesh = jax.make_mesh((8,), ("x",))
    there = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x"), memory_kind="pinned_host"))
    here = jnp.ones(2)
    found = move_to_devices({"there": there, "here": here, "number": 3})
    assert not is_on_host(found["there"])
    assert found["there"].sharding == NamedSharding(mesh, P("x"), memory_kind="device")
    np.testing.assert_array_equal(found["there"], np.arange(8.0))
    assert (found["here"] is here, found["number"]) == (True, 3)


def a_mesh(kinds, name="TPU v5"):
    """A mesh of devices that only compile, without kinds of memory, or of others."""
    memories = [types.SimpleNamespace(kind=kind) for kind in kinds]
    device = types.SimpleNamespace(
        device_kind=name, addressable_memories=lambda: memories, default_memory=lambda: memories[0]
    )
    return types.SimpleNamespace(devices=np.array([device], object))


def test_the_memory_of_slots_is_one_that_the_devices_have():
    mesh = a_mesh(["device", "pinned_host"])
    assert [as_memory(kind, mesh) for kind in (None, "device", "pinned_host")] == [
        None,
        None,
        "pinned_host",
    ]
    assert as_memory("hbm", a_mesh(["hbm", "host"])) is None  # their default
    with pytest.raises(ValueError, match="slots_memory") as caught:
        as_memory("far", a_mesh(["device", "host"]))
    assert str(caught.value) == "slots_memory='far': must be one of 'device', 'host'"


def test_shapes_are_refused_where_arrays_are_needed(monkeypatch):
    array, shape = jnp.ones(2), jax.ShapeDtypeStruct((2,), jnp.float32)
    check_no_shapes({"a": array, "b": 3}, "state")
    with pytest.raises(ValueError, match="state and batch") as caught:
        check_no_shapes({"a": array, "b": shape}, "state and batch")
    assert str(caught.value) == (
        "state and batch: must be arrays, got shapes (jax.ShapeDtypeStruct), "
        "which cannot be run; use jstep.cost or "
        "lower with them"
    )
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    sharded = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    check_not_compile_only({"a": sharded, "b": sharding, "c": array, "d": shape}, "state")
    monkeypatch.setattr("jstep.core.placement.is_compile_only", lambda device: True)
    for tree in (sharded, sharding):
        with pytest.raises(ValueError, match="only compile") as caught:
            check_not_compile_only([shape, tree], "state")
        assert str(caught.value) == (
            "state: these 8 'cpu' devices only compile; "
            "use jstep.cost or lower with them, and run on devices of this "
            "machine"
        )
