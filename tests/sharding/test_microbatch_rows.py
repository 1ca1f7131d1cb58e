"""Which rows of a sharded batch make a microbatch: every n-th, of which each device has its share."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

MESHES = {
    "one axis": ((8,), ("data",), P("data")),
    "one of two": ((4, 2), ("data", "model"), P("data")),
    "both of two": ((4, 2), ("data", "model"), P(("data", "model"))),
    "columns too": ((4, 2), ("data", "model"), P("data", "model")),
}


def placed(case, types, *leaves):
    shape, names, spec = MESHES[case]
    mesh = jax.make_mesh(shape, names, axis_types=(types,) * len(names))
    return mesh, [jax.device_put(leaf, NamedSharding(mesh, spec)) for leaf in leaves]


def collectives(step, state, *batch):
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return set(re.findall(rf" ({kinds})(?:-start)?\(", step.lower(state, *batch).compile().as_text()))


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("case", MESHES)
def test_no_row_moves_between_devices(case, types):
    mesh, (x, y) = placed(case, types, np.ones((64, 16), np.float32), np.ones((64, 4), np.float32))
    rows = P(MESHES[case][2][0])

    def annotated(params, x, y):
        hidden = jnp.tanh(jnp.einsum("bi,ij->bj", x, params["a"], out_sharding=rows))
        return jnp.mean((jnp.einsum("bi,ij->bj", hidden, params["b"], out_sharding=rows) - y[:, :4]) ** 2)

    def plain(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)

    optimizer = jstep.adam(1e-2)
    state = jstep.TrainState.create({"a": jnp.ones((16, 32)), "b": jnp.ones((32, 4))}, optimizer, mesh=mesh)
    step = jstep.minimize(plain if types is AxisType.Auto else annotated, optimizer, num_microbatches=4)
    stacked = [jnp.stack([leaf, leaf]) for leaf in (x, y)]
    if case != "columns too":  # products over columns that are sharded are gathered or reduced anyway
        assert collectives(step, state, x, y) == {"all-reduce"}
        assert collectives(jstep.scan_steps(step), state, *stacked) == {"all-reduce"}
    else:
        assert not {"all-to-all", "collective-permute"} & collectives(step, state, x, y)


def seen_by(step_batch, mesh=None, n=4):
    """The first leaf of each microbatch, as the loss saw it."""
    size = step_batch[0].shape[0]

    def loss(params, model_state, *batch):
        i, seen = model_state["i"], model_state["seen"]
        ids = [leaf[:, 0] for leaf in batch]
        differ = sum(jnp.sum(jnp.abs(ids[0] - one)) for one in ids)
        after = {"i": i + 1, "seen": seen.at[i].set(ids[0])}
        return params["w"] * jnp.mean(batch[0]), (after, {"differ": differ})

    optimizer = jstep.gradient_descent(0.1)
    state = jstep.TrainState.create(
        {"w": 1.0},
        optimizer,
        model_state={"i": jnp.int32(0), "seen": jnp.zeros((n, size // n))},
        mesh=mesh,
    )
    step = jstep.minimize(loss, optimizer, has_aux=True, has_model_state=True, num_microbatches=n)
    state, metrics = step(state, *step_batch)
    assert float(metrics["differ"]) == 0
    assert float(metrics["loss"]) == pytest.approx(float(np.mean(np.asarray(step_batch[0]))))
    return np.asarray(state.slots["model_state"]["seen"]).astype(int)


def ids(rows):
    return np.tile(np.arange(rows, dtype=np.float32)[:, None], (1, 4))


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("case", "rows"), [*((case, 64) for case in MESHES), ("one axis", 16)])
def test_a_microbatch_is_every_nth_row(case, rows, types):
    """Whatever the mesh; also where a microbatch has fewer rows than there are devices."""
    mesh, (x,) = placed(case, types, ids(rows))
    want = np.arange(rows).reshape(rows // 4, 4).T
    np.testing.assert_array_equal(seen_by([x], mesh), want)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_all_leaves_are_split_alike(types):
    """A leaf that every device has whole follows one that is sharded."""
    mesh, (x,) = placed("one axis", types, ids(32))
    whole = jax.device_put(ids(32), NamedSharding(mesh, P()))
    want = np.arange(32).reshape(8, 4).T
    np.testing.assert_array_equal(seen_by([whole, x], mesh), want)
    np.testing.assert_array_equal(seen_by([x, whole], mesh), want)


def test_rows_that_are_not_sharded_stay_in_blocks():
    blocks = np.arange(32).reshape(4, 8)
    np.testing.assert_array_equal(seen_by([ids(32)]), blocks)
    one = jax.make_mesh((1,), ("data",))
    np.testing.assert_array_equal(seen_by(jstep.shard_batch([ids(32)], one), one), blocks)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    columns = jax.device_put(ids(32), NamedSharding(mesh, P(None, "model")))
    np.testing.assert_array_equal(seen_by([columns], mesh), blocks)


def test_weights_count_the_same_on_any_number_of_devices():
    """Padded tokens: the mean over all tokens, whichever microbatch they are in."""

    def loss(params, x, mask):
        return jnp.sum(mask * (x * params["w"][None]).sum(1) ** 2) / jnp.maximum(jnp.sum(mask), 1)

    random = np.random.default_rng(0)
    x, mask = random.normal(size=(32, 4)).astype(np.float32), (random.uniform(size=32) < 0.4).astype(np.float32)
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(loss, optimizer, num_microbatches=4, weight_fn=lambda x, mask: jnp.sum(mask))
    want, _ = jstep.minimize(loss, optimizer)(jstep.TrainState.create({"w": jnp.ones(4)}, optimizer), x, mask)
    for devices in (1, 2, 8):
        mesh = jax.make_mesh((devices,), ("data",))
        state = jstep.TrainState.create({"w": jnp.ones(4)}, optimizer, mesh=mesh)
        state, _ = step(state, *jstep.shard_batch((x, mask), mesh))
        np.testing.assert_allclose(state.params["w"], want.params["w"], rtol=1e-5)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_microbatches_smaller_than_the_mesh_are_warned_about(types, caplog):
    _, (x,) = placed("one axis", types, np.ones((32, 16), np.float32))
    optimizer = jstep.gradient_descent(0.1)
    state = jstep.shard_state(jstep.TrainState.create({"a": jnp.ones((16, 4))}, optimizer), x.sharding.mesh)

    def loss_fn(params, x):
        return jnp.mean((x @ params["a"]) ** 2)

    jstep.minimize(loss_fn, optimizer, num_microbatches=4, donate=False)(state, x)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    jstep.minimize(loss_fn, optimizer, num_microbatches=8, donate=False)(state, x)
    said = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert said == {
        "num_microbatches=8: microbatches of 4 rows do not split over 8 devices, so each device computes all of their "
        "rows; use at most 4 microbatches"
    }
