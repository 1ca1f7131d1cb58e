"""Rows of microbatches: every n-th row, on one device as on a mesh, so that no row moves between
devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_text import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

MESHES = {
    "one axis": ((8,), ("data",), P("data")),
    "both of two": ((4, 2), ("data", "model"), P(("data", "model"))),
    "rows and columns": ((4, 2), ("data", "model"), P("data", "model")),
}


def shard(case, types, *leaves):
    shape, names, spec = MESHES[case]
    mesh = jax.make_mesh(shape, names, axis_types=(types,) * len(names))
    return mesh, [jax.device_put(leaf, NamedSharding(mesh, spec)) for leaf in leaves]


def kinds_of_collectives(step, state, *batch):
    return set(collectives(step.lower(state, *batch).compile().as_text()))


@pytest.mark.thorough
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("case", MESHES)
def test_no_row_moves_between_devices(case, types):
    mesh, (x, y) = shard(case, types, np.ones((64, 16), np.float32), np.ones((64, 4), np.float32))
    rows = P(MESHES[case][2][0])

    def annotated(params, x, y):
        hidden = jnp.tanh(jnp.einsum("bi,ij->bj", x, params["a"], out_sharding=rows))
        return jnp.mean(
            (jnp.einsum("bi,ij->bj", hidden, params["b"], out_sharding=rows) - y[:, :4]) ** 2
        )

    def plain(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)

    optimizer = jstep.adam(1e-2)
    state = jstep.TrainState.create(
        {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 4))}, optimizer, mesh=mesh
    )
    step = jstep.minimize(
        plain if types is AxisType.Auto else annotated, optimizer, num_microbatches=4
    )
    stacked = [jnp.stack([leaf, leaf]) for leaf in (x, y)]
    if case != "rows and columns":
        # Products over sharded columns need a gather or reduction anyway.
        assert kinds_of_collectives(step, state, x, y) == {"all-reduce"}
        assert kinds_of_collectives(jstep.scan_steps(step), state, *stacked) == {"all-reduce"}
    else:
        assert not {"all-to-all", "collective-permute"} & kinds_of_collectives(step, state, x, y)


def microbatches_of(step_batch, mesh=None, n=4):
    """Return the first leaf of each microbatch, as passed to the loss."""
    size = step_batch[0].shape[0]

    def loss(params, model_state, *batch):
        i, seen = model_state["i"], model_state["seen"]
        ids = [leaf[:, 0] for leaf in batch]
        differ = sum(jnp.sum(jnp.abs(ids[0] - other)) for other in ids)
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


@pytest.mark.thorough
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("case", "rows"), [*((case, 64) for case in MESHES), ("one axis", 16)])
def test_microbatches_take_every_nth_row(case, rows, types):
    """This holds on all meshes, also if a microbatch has fewer rows than there are devices."""
    mesh, (x,) = shard(case, types, ids(rows))
    want = np.arange(rows).reshape(rows // 4, 4).T
    np.testing.assert_array_equal(microbatches_of([x], mesh), want)


def test_rows_that_are_not_sharded_are_split_equally():
    want = np.arange(32).reshape(8, 4).T
    np.testing.assert_array_equal(microbatches_of([ids(32)]), want)
    single = jax.make_mesh((1,), ("data",))
    np.testing.assert_array_equal(
        microbatches_of(jstep.shard_batch([ids(32)], single), single), want
    )
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    columns = jax.device_put(ids(32), NamedSharding(mesh, P(None, "model")))
    np.testing.assert_array_equal(microbatches_of([columns], mesh), want)


def test_one_device_copies_no_batch():
    """A transposed batch would be a second one in memory, on one device and on several."""
    optimizer = jstep.gradient_descent(0.1)

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    step = jstep.minimize(loss, optimizer, num_microbatches=16)
    x = np.ones((1024, 256), np.float32)
    for mesh in (None, jax.make_mesh((4,), ("data",))):
        state = jstep.TrainState.create({"w": jnp.ones((256, 2))}, optimizer, mesh=mesh)
        batch = x if mesh is None else jstep.shard_batch(x, mesh)
        assert jstep.cost(step, state, batch).temp_bytes < x.nbytes / (4 if mesh is None else 8)


@pytest.mark.thorough
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_numbers_do_not_depend_on_the_devices(types):
    """Random numbers, model state, weights and the noise scale depend on which rows are
    together."""

    def loss(params, mean, x, mask, rng):
        noise = jax.random.normal(rng)
        value = jnp.sum(mask * (x @ params["w"] * noise) ** 2) / jnp.maximum(jnp.sum(mask), 1)
        return value, (0.9 * mean + noise * jnp.mean(x), {"noisy": noise * jnp.mean(x)})

    optimizer = jstep.with_noise_scale(jstep.adam(1e-2))
    step = jstep.minimize(
        loss,
        optimizer,
        has_aux=True,
        has_model_state=True,
        num_microbatches=4,
        weight_fn=lambda x, mask: jnp.sum(mask),
        rng=jax.random.key(1),
        metrics=("noise_scale", "grad_norm"),
    )
    random = np.random.default_rng(0)
    x, mask = (
        random.normal(size=(64, 4)).astype(np.float32),
        (random.uniform(size=64) < 0.4).astype(np.float32),
    )
    runs = []
    for devices in (None, 1, 4, 8):
        mesh = devices and jax.make_mesh(
            (devices,), ("data",), axis_types=(types,), devices=jax.devices()[:devices]
        )
        state = jstep.TrainState.create(
            {"w": jnp.ones(4)}, optimizer, model_state=jnp.float32(0), mesh=mesh
        )
        for n in range(3):
            batch = (x + n, mask) if mesh is None else jstep.shard_batch((x + n, mask), mesh)
            state, metrics = step(state, *batch)
        runs.append(jax.device_get((state.params, state.slots, metrics)))
    for other in runs[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), other, runs[0]
        )


@pytest.mark.thorough(except_for=["AxisType.Explicit"])
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_microbatches_smaller_than_the_mesh_warn(types, caplog):
    _, (x,) = shard("one axis", types, np.ones((32, 16), np.float32))
    optimizer = jstep.gradient_descent(0.1)
    state = jstep.shard_state(
        jstep.TrainState.create({"a": jnp.ones((16, 4))}, optimizer), x.sharding.mesh
    )

    def loss_fn(params, x):
        return jnp.mean((x @ params["a"]) ** 2)

    jstep.minimize(loss_fn, optimizer, num_microbatches=4, donate=False)(state, x)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    jstep.minimize(loss_fn, optimizer, num_microbatches=8, donate=False)(state, x)
    warnings = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert warnings == {
        "num_microbatches=8: microbatches of 4 rows do not split over 8 devices, "
        "so each device computes all of their "
        "rows; use fewer microbatches, or a larger batch"
    }


# `batch_sharding` as the name of a mesh axis, or a tuple of names: in `train`, `evaluator` and
# `replay`.

OPTIMIZER = jstep.adam(0.1)
X = np.arange(64, dtype=np.float32).reshape(32, 2) / 64
SEEN = []


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - 1.0) ** 2)


STEP = jstep.minimize(loss_fn, OPTIMIZER)
DATA = jstep.batches({"x": X}, 8, seed=0)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh(
        (2, 2), ("data", "data2"), axis_types=(kind, kind), devices=jax.devices()[:4]
    )


def make_state(mesh):
    return jstep.shard_state(jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER), mesh)


def watched(step):
    """A step that records how its batch is sharded."""

    def run(state, batch):
        SEEN.append(jax.tree.map(lambda leaf: leaf.sharding, batch))
        return step(state, batch)

    return run


NAMES = {
    "one name": ("data", P("data")),
    "several names": (("data", "data2"), P(("data", "data2"))),
    "one in a tuple": (("data2",), P("data2")),
    "in a tree": ({"x": "data"}, P("data")),
}


@pytest.mark.thorough(except_for=["in a tree-AxisType.Auto"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("names", NAMES)
def test_names_are_the_sharding_over_the_mesh_of_the_state(names, kind):
    names, spec = NAMES[names]
    mesh = mesh_of(kind)
    SEEN.clear()
    state = jstep.train(
        watched(STEP), make_state(mesh), DATA, 3, batch_sharding=names, progress=False
    )
    assert [one["x"] for one in SEEN] == [NamedSharding(mesh, spec)] * 3
    expected = jstep.train(
        STEP,
        make_state(mesh),
        DATA,
        3,
        batch_sharding=NamedSharding(mesh, spec),
        progress=False,
        steps_per_call=2,
    )
    again = jstep.train(
        STEP, make_state(mesh), DATA, 3, batch_sharding=names, progress=False, steps_per_call=2
    )
    bits = [jstep.fingerprint(one).tolist() for one in (state, again, expected)]
    assert bits[0] == bits[1] == bits[2]


def test_the_mesh_of_the_state_counts_and_not_the_one_that_is_set():
    mesh = mesh_of()
    other = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    SEEN.clear()
    with jax.set_mesh(other):
        jstep.train(watched(STEP), make_state(mesh), DATA, 1, batch_sharding="data", progress=False)
    assert SEEN[0]["x"] == NamedSharding(mesh, P("data"))


def test_an_evaluator_takes_the_mesh_of_each_state():
    batches = [{"x": X}, {"x": X[:5]}]
    evaluate = jstep.evaluator(
        lambda params, batch: {"x": batch["x"][:, 0]}, batches, batch_sharding="data"
    )
    whole = float(np.concatenate([X, X[:5]])[:, 0].mean())
    assert evaluate(make_state(mesh_of()))["x"] == pytest.approx(whole)
    other = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    assert evaluate(make_state(other))["x"] == pytest.approx(whole)
    hook = jstep.EvaluationHook(evaluate, every_n_steps=2)
    jstep.train(
        STEP, make_state(mesh_of()), DATA, 2, batch_sharding="data", hooks=[hook], progress=False
    )
    assert hook.results[2]["x"] == pytest.approx(whole)


# The warning for a run whose devices all compute the whole batch.

ROWS = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return jax.make_mesh((8,), ("examples",), axis_types=(request.param,))


def loss_fn_of_rows(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def warnings(
    caplog, mesh, spec=None, loss_fn=loss_fn_of_rows, batches=None, params=None, **options
):
    spec = P() if spec is None else spec
    optimizer = jstep.adam(0.1)
    params = (
        {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec))}
        if params is None
        else params
    )
    state = jstep.TrainState.create(params, optimizer)
    batches = jstep.batches(ROWS, 16, seed=0) if batches is None else batches
    jstep.train(jstep.minimize(loss_fn, optimizer), state, batches, 4, progress=False, **options)
    return [
        record.getMessage()
        for record in caplog.records
        if "computes all rows" in record.getMessage()
    ]


@pytest.mark.thorough(except_for=["explicit-2"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_replicated_parameters_and_batches_give_one_warning(caplog, mesh, steps_per_call):
    (message,) = warnings(caplog, mesh, steps_per_call=steps_per_call)
    assert "each of the 8 devices" in message
    assert "batch_sharding='examples'" in message


@pytest.mark.thorough(except_for=["explicit"])
def test_the_remedy_of_the_warning_works(caplog, mesh):
    assert not warnings(caplog, mesh, batch_sharding=NamedSharding(mesh, P("examples")))


@pytest.mark.thorough
def test_split_parameters_give_no_warning(caplog):
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    assert not warnings(caplog, mesh, P(None, "model"))


@pytest.mark.thorough
def test_a_loss_that_shards_its_activations_gives_no_warning(caplog, mesh):
    def sharded(params, x):
        if AxisType.Explicit in mesh.axis_types:
            return loss_fn_of_rows(params, jax.reshard(x, P("examples")))
        return loss_fn_of_rows(
            params, jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("examples")))
        )

    def mapped(params, x):
        def local(w, x):
            return jax.lax.pmean(loss_fn_of_rows({"w": w}, x), "examples")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("examples")), out_specs=P())(
            params["w"], x
        )

    assert not warnings(caplog, mesh, loss_fn=sharded)
    if AxisType.Auto in mesh.axis_types:  # on Explicit axes JAX refuses an unsharded batch here
        assert not warnings(caplog, mesh, loss_fn=mapped)
