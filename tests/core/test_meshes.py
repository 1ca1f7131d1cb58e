"""Which axes a function of jstep and one of the user see, and how meshes and shardings are
written."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from waiting import TIMEOUT

from jstep.core import meshes, threads

EXPLICIT = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
MIXED = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
VALUES = np.arange(32.0, dtype=np.float32).reshape(8, 4)


@pytest.mark.parametrize(
    ("mesh", "seen"),
    [(EXPLICIT, P("x", "y")), (MIXED, P("x", None))],
    ids=["explicit", "explicit-and-auto"],
)
def test_the_users_function_sees_its_own_axes_within_jsteps_computations(mesh, seen):
    params = {"w": jax.device_put(VALUES, NamedSharding(mesh, P("x", "y"))), "name": "a"}
    found = []

    def fn(params):
        found.append((jax.typeof(params["w"]).sharding.spec, params["name"]))
        return {"double": 2 * params["w"], "name": params["name"]}

    outside = meshes.leaving_auto_axes(fn, params)

    def own(params):
        types = set(jax.sharding.get_abstract_mesh().axis_types)
        made = outside(params)
        found.append((types, jax.typeof(made["double"]).sharding.spec))
        return made["double"]

    made = meshes.call_on_auto_axes(own, params, specs_of=lambda result: P("x", "y"))
    assert found == [(seen, "a"), ({AxisType.Auto}, P(None, None))]
    assert made.sharding == NamedSharding(mesh, P("x", "y"))
    np.testing.assert_array_equal(made, 2 * VALUES)


def test_without_explicit_axes_a_function_stays_as_it_is():
    def fn(params):
        return params

    auto = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    for params in (jnp.ones(8), jax.device_put(jnp.ones(8), NamedSharding(auto, P("x")))):
        assert meshes.leaving_auto_axes(fn, params) is fn


def test_a_mesh_is_set_also_where_a_program_is_traced():
    found = []

    def traced(x):
        with meshes.using_mesh(EXPLICIT):
            found.append(jax.sharding.get_abstract_mesh())
        with meshes.using_mesh(None):
            found.append(jax.sharding.get_abstract_mesh().empty)
        return x

    jax.jit(traced)(1.0)
    assert found == [EXPLICIT.abstract_mesh, True]
    with meshes.using_mesh(EXPLICIT):
        assert jax.sharding.get_mesh() == EXPLICIT
        with meshes.using_mesh(MIXED):
            assert jax.sharding.get_mesh() == MIXED
        with meshes.using_mesh(EXPLICIT):
            assert jax.sharding.get_mesh() == EXPLICIT
    assert jax.sharding.get_mesh().empty


def test_the_result_is_computed_on_every_device_of_auto_axes():
    def fn(x):
        found.append(set(jax.sharding.get_abstract_mesh().axis_types))
        return 2 * x

    for kind, inside in (("Auto", {AxisType.Manual}), ("Explicit", {AxisType.Explicit})):
        found = []
        with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(AxisType[kind],))):
            assert jax.jit(lambda x: meshes.replicate_call(fn, x))(jnp.ones(3)).tolist() == [
                2,
                2,
                2,
            ]
        assert found == [inside]
    assert meshes.replicate_call(lambda x, y: x - y, 3, 2) == 1


def test_words_of_meshes_and_shardings():
    assert meshes.mesh_text(MIXED) == "x: 4 Explicit, y: 2 Auto"
    split, one = NamedSharding(MIXED, P("x", None)), SingleDeviceSharding(jax.devices()[0])
    assert meshes.sharding_text(split) == f"{P('x', None)} over (x: 4 Explicit, y: 2 Auto)"
    assert meshes.sharding_text(split.with_memory_kind("device")) == meshes.sharding_text(split)
    assert meshes.sharding_text(split.with_memory_kind("pinned_host")) == (
        f"{P('x', None)} over (x: 4 Explicit, y: 2 Auto) in pinned_host"
    )
    assert meshes.sharding_text(one) == "SingleDeviceSharding"
    assert meshes.sharding_text(one.with_memory_kind("pinned_host")) == (
        "SingleDeviceSharding in pinned_host"
    )
    assert [meshes.parts_along(MIXED, axis) for axis in (None, "x", "y", ("x", "y"), ())] == [
        1,
        4,
        2,
        8,
        1,
    ]


def test_a_thread_that_was_not_started_runs_in_the_contexts_of_its_caller():
    found = []
    thread = threads.Thread(target=lambda: found.append(threading.current_thread()))
    thread.run()
    assert found == [threading.current_thread()]


def test_a_program_that_cannot_be_traced_adds_nothing_to_the_callers():
    calls = []

    def fn(x, name):
        y = x + 1
        calls.append((y, name))
        if name == "bad":
            raise TypeError(name)
        return 2 * y

    assert meshes.atomic(fn, jnp.float32(1), "good") == 4
    assert [isinstance(y, jax.core.Tracer) for y, _ in calls] == [True, False]  # traced, then run

    def caller(x):
        for name in ("bad", "good"):
            try:
                x = meshes.atomic(fn, x, name)
            except TypeError:
                continue
        return x

    assert str(jax.make_jaxpr(caller)(1.0)).count(" add ") == 1


@pytest.mark.thorough
def test_a_thread_that_waits_for_itself_is_an_error():
    """As with `Thread.join`: a close of a writer that its own thread calls must not hang."""
    seen = []

    def own():
        try:
            threads.join_thread(threading.current_thread())
        except RuntimeError as error:
            seen.append(error)

    thread = threads.Thread(target=own, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    assert "cannot join current thread" in str(seen)
