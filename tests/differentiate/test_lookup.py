"""`lookup`: rows of a table, with a sparse gradient."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

TABLE = jnp.arange(12.0).reshape(6, 2)
IDS = jnp.array([[1, 4], [1, -1]])


def loss_fn(params, ids):
    return jnp.sum(jstep.lookup(params["t"], ids) ** 2) + params["b"]


def params():
    return {"t": TABLE, "b": jnp.float32(0)}


def dense(loss, *args):
    return jax.jit(jax.grad(loss))(params(), *args)["t"]


@pytest.mark.thorough(except_for=["2-True"])
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_gradients_are_sparse(jit, n):
    compute = jstep.compute_gradients(loss_fn, num_microbatches=n)
    _, grads = (jax.jit(compute) if jit else compute)(params(), IDS)
    assert isinstance(grads["t"], jstep.IndexedSlices)
    np.testing.assert_array_equal(np.asarray(grads["t"].indices), [1, 4, 1, 5])
    np.testing.assert_allclose(grads["t"].to_dense(), dense(loss_fn, IDS) / n)
    assert not isinstance(jax.grad(loss_fn)(params(), IDS)["t"], jstep.IndexedSlices)


@pytest.mark.thorough
def test_lookups_are_merged_and_other_uses_are_dense():
    def twice(p):
        return jnp.sum(jstep.lookup(p["t"], jnp.array([1, 2])) * jstep.lookup(p["t"], 3)[None])

    _, grads = jstep.compute_gradients(twice)(params())
    assert sorted(np.asarray(grads["t"].indices).tolist()) == [1, 2, 3]
    np.testing.assert_allclose(grads["t"].to_dense(), dense(twice))

    def mixed_uses(p):
        return jnp.sum(jstep.lookup(p["t"], IDS) ** 2) + jnp.sum(p["t"]) * 3

    _, grads = jax.jit(jstep.compute_gradients(mixed_uses))(params())
    np.testing.assert_allclose(grads["t"], dense(mixed_uses))


TRANSFORMED = {
    "scan": lambda p: jax.lax.scan(
        lambda c, i: (c + jnp.sum(jstep.lookup(p["t"], i) ** 2), None), 0.0, IDS
    )[0],
    "vmap": lambda p: jnp.sum(jax.vmap(lambda i: jstep.lookup(p["t"], i) ** 2)(IDS)),
    "cond": lambda p: jax.lax.cond(
        p["b"] < 1, lambda: jnp.sum(jstep.lookup(p["t"], IDS) ** 2), lambda: 0.0
    ),
    "remat": jax.checkpoint(lambda p: jnp.sum(jstep.lookup(p["t"], IDS) ** 2)),
    "jit": jax.jit(lambda p: jnp.sum(jstep.lookup(p["t"], IDS) ** 2)),
    "grad": lambda p: jnp.sum(jax.grad(lambda t: jnp.sum(jstep.lookup(t, IDS) ** 3))(p["t"])),
}


@pytest.mark.thorough(except_for=["scan"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_lookups_in_other_transformations_are_dense(name):
    _, grads = jax.jit(jstep.compute_gradients(TRANSFORMED[name]))(params())
    np.testing.assert_allclose(grads["t"], dense(TRANSFORMED[name]))


def test_step_does_not_allocate_the_table():
    """The compiled step needs less than 1 MiB of temporaries for a table of 8 MiB."""
    optimizer = jstep.adagrad(0.1)
    table = {
        "t": jax.ShapeDtypeStruct((1 << 15, 64), jnp.float32),
        "b": jax.ShapeDtypeStruct((), jnp.float32),
    }
    state = jax.eval_shape(lambda p: jstep.TrainState.create(p, optimizer), table)
    step = jstep.minimize(loss_fn, optimizer)
    program = step.lower(state, jax.ShapeDtypeStruct((16,), jnp.int32)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1 << 20


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("table", "ids", "rows"),
    [
        (P(None, "model"), P("data"), P("data", "model")),
        (P(None, "model"), P("model"), P("model", None)),
    ],
)
def test_rows_on_explicit_axes_are_sharded_like_ids_and_table(table, ids, rows):
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    values, places = np.arange(32.0).reshape(8, 4), np.array([5, 1, 7, 1])
    given = (
        jax.device_put(values, NamedSharding(mesh, table)),
        jax.device_put(places, NamedSharding(mesh, ids)),
    )
    for context in (jax.set_mesh(mesh), contextlib.nullcontext()):
        with context:
            found = jstep.lookup(*given)
        assert jax.typeof(found).sharding.spec == rows
        np.testing.assert_array_equal(found, values[places])


def test_map_gradients():
    grads = {
        "t": jstep.IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 1]), (6, 2)),
        "b": jnp.float32(3),
        "c": None,
    }
    mapped = jstep.map_gradients(lambda g: g * 2, grads)
    assert mapped["c"] is None
    assert float(mapped["b"]) == 6
    np.testing.assert_array_equal(mapped["t"].values, 2.0)
    np.testing.assert_array_equal(mapped["t"].indices, [1, 1])
    with pytest.raises(TypeError, match="fn=3: must be a function"):
        jstep.map_gradients(3, grads)


@pytest.mark.thorough
def test_gradients_of_two_tasks_are_added():
    """A leaf that one of them lacks is zeros there, slices name the rows that any of them names."""

    def slices(values, indices):
        return jstep.IndexedSlices(jnp.array(values)[:, None], jnp.array(indices), (6, 1))

    one = {
        "a": jnp.float32(1),
        "b": None,
        "none": None,
        "t": slices([1.0, 2.0, 3.0], [4, 2, 4]),
        "mixed": jnp.ones((6, 1)),
    }
    two = {
        "a": None,
        "b": jnp.float32(2),
        "none": None,
        "t": slices([10.0], [2]),
        "mixed": slices([5.0], [1]),
    }
    for jit in (lambda fn: fn, jax.jit):
        total = jit(lambda *grads: jstep.map_gradients(lambda a, b: a + 2 * b, *grads))(one, two)
        assert (float(total["a"]), float(total["b"]), total["none"]) == (1, 4, None)
        np.testing.assert_array_equal(total["t"].to_dense()[:, 0], [0, 0, 22, 0, 4, 0])
        assert set(np.asarray(total["t"].indices).tolist()) == {2, 4}
        np.testing.assert_array_equal(total["mixed"][:, 0], [1, 11, 1, 1, 1, 1])
        product = jit(lambda *grads: jstep.map_gradients(jnp.multiply, *grads))(one, two)
        np.testing.assert_array_equal(product["t"].to_dense()[:, 0], [0, 0, 20, 0, 0, 0])
        three = jit(lambda *grads: jstep.map_gradients(lambda a, b, c: a + b + c, *grads))(
            one, two, two
        )
        assert (float(three["a"]), float(three["b"])) == (1, 4)
    with pytest.raises(ValueError, match=r"pytree structure error|different|key mismatch"):
        jstep.map_gradients(jnp.add, one, {"a": 1.0})
    with pytest.raises(ValueError, match="the gradients at 'a' have different shapes"):
        jstep.map_gradients(jnp.add, one, {**two, "a": jnp.ones(3)})


def test_gradients_of_two_losses_update_as_their_sum():
    params = {
        "shared": jnp.float32(2),
        "a": jnp.float32(3),
        "b": jnp.float32(4),
        "unused": jnp.float32(5),
    }
    optimizer = jstep.adam(0.1)
    state = jstep.TrainState.create(params, optimizer)
    first = jstep.compute_gradients(lambda p: p["shared"] * p["a"])(params)[1]
    second = jstep.compute_gradients(lambda p: p["shared"] * p["b"] ** 2)(params)[1]
    of_both = jstep.compute_gradients(lambda p: p["shared"] * p["a"] + p["shared"] * p["b"] ** 2)
    both = of_both(params)[1]
    added = jstep.map_gradients(jnp.add, first, second)
    assert added["unused"] is None
    one, other = (jstep.apply_gradients(state, grads, optimizer) for grads in (added, both))
    assert jax.tree.map(float, one.params) == jax.tree.map(float, other.params)


def test_table_in_an_nnx_variable():
    nnx = pytest.importorskip("flax.nnx")
    graphdef, boxed = nnx.split(nnx.Embed(6, 2, rngs=nnx.Rngs(0)), nnx.Param)

    def loss(params):
        return jnp.sum(jstep.lookup(nnx.merge(graphdef, params, copy=True).embedding, IDS) ** 2)

    _, grads = jax.jit(jstep.compute_gradients(loss))(boxed)
    (rows,) = jax.tree.leaves(grads, is_leaf=lambda x: isinstance(x, jstep.IndexedSlices))
    np.testing.assert_array_equal(np.asarray(rows.indices), [1, 4, 1, 5])


@pytest.mark.thorough(except_for=["jit-ids1", "lanes-ids0"])
@pytest.mark.parametrize("ids", [[6, 1], [100, 1], [-7, 1], [2**31 - 1, 1]])
@pytest.mark.parametrize("how", ["lookup", "jit", "minimize", "scan", "lanes"])
def test_ids_outside_of_the_table_are_nan(ids, how):
    """They read the last row, or the first one, and their gradients were dropped."""
    given = jnp.array(ids)
    if how in ("lookup", "jit"):
        rows = (jax.jit(jstep.lookup) if how == "jit" else jstep.lookup)(TABLE, given)
        assert np.isnan(rows[0]).all()
        np.testing.assert_array_equal(rows[1], TABLE[1])
        assert np.isnan(
            jstep.lookup(TABLE.astype(jnp.bfloat16), given)[0].astype(jnp.float32)
        ).all()
        assert jstep.lookup(jnp.arange(6), given)[1] == 1  # integers have no NaN
        return
    optimizer = jstep.sgd(0.1)
    options = {"lanes": 2} if how == "lanes" else {}

    def loss(p, ids):
        if how == "scan":
            return jax.lax.scan(
                lambda total, i: (total + jnp.sum(jstep.lookup(p["t"], i)), None), 0.0, ids
            )[0]
        return jnp.sum(jstep.lookup(p["t"], ids))

    step = jstep.minimize(loss, optimizer, **options)
    assert np.isnan(step(jstep.TrainState.create(params(), optimizer), given)[1]["loss"])


@pytest.mark.thorough
def test_the_last_row_is_minus_one():
    np.testing.assert_array_equal(
        jstep.lookup(TABLE, jnp.array([-1, -6])), TABLE[jnp.array([5, 0])]
    )
    for dtype in (jnp.uint8, jnp.int8):
        np.testing.assert_array_equal(
            jstep.lookup(TABLE, jnp.array([5, 0], dtype)), TABLE[jnp.array([5, 0])]
        )


@pytest.mark.thorough(except_for=["True"])
@pytest.mark.parametrize("explicit", [True, False])
def test_outside_of_a_table_on_a_mesh(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    table = jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(mesh, P(None, "model")))
    ids = jax.device_put(jnp.array([0, 4, -5, 3]), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        rows = np.asarray(jax.jit(jstep.lookup)(table, ids))
    assert np.isnan(rows).any(axis=1).tolist() == [False, True, True, False]
