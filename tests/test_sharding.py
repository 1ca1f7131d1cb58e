"""States and batches over a mesh of 8 devices: the same training, laid out otherwise."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizer_table import TABLE

import jstep
from jstep.sharding.layout import auto_mesh

DATA = jax.make_mesh((8,), ("data",))
BOTH = jax.make_mesh((4, 2), ("data", "model"))
AUTO = auto_mesh(DATA)


def init():
    """What `label` of the optimizer table splits into two groups: paths that end in a or x, and others."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "a": jax.random.normal(keys[0], (16, 32)) / 4,
        "bias": jnp.zeros(32),
        "deep": {"x": jax.random.normal(keys[1], (32, 16)) / 6, "y": jnp.zeros((16, 3))},
        "scale": jnp.ones(()),
    }


def predict(params, x):
    hidden = jnp.tanh(x @ params["a"] + params["bias"][None])
    return params["scale"] * (jnp.tanh(hidden @ params["deep"]["x"]) @ params["deep"]["y"])


def loss_fn(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def data(rows=64):
    random = np.random.default_rng(1)
    x = random.normal(size=(rows, 16)).astype(np.float32)
    return x, np.tanh(x[:, :3] * 2)


COLUMNS_AND_ROWS = [("a", P(None, "model")), ("bias", P("model")), ("deep/x", P("model"))]
LAYOUTS = {
    "data": (DATA, {}),
    "zero1": (DATA, {"slot_axis": "data"}),
    "fsdp": (DATA, {"param_specs": jstep.fsdp_specs(jax.eval_shape(init), DATA, min_size=64)}),
    "model": (BOTH, {"param_specs": COLUMNS_AND_ROWS, "slot_axis": "data"}),
}


def create(layout, optimizer, **kwargs):
    mesh, how = LAYOUTS[layout]
    return jstep.TrainState.create(init, optimizer, mesh=mesh, **how, **kwargs)


def shardings(tree):
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def run(step, state, place=lambda batch: batch, steps=50):
    batches = jstep.batches(data(), 32, seed=2)
    for n in range(steps):
        state, metrics = step(state, *place(batches[n]))
    return state, metrics


def assert_close(got, want, rtol=2e-4, atol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol, atol), got, want)


# --- the same training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_training_equals_that_of_one_device(name, compilations):
    """50 steps of every optimizer; one compilation, every leaf where it lay, the memory taken over."""
    optimizer = TABLE[name].make(TABLE[name].rate)
    alone = jstep.TrainState.create(init(), optimizer)
    want, metrics = run(jstep.minimize(loss_fn, optimizer, metrics=("grad_norm", "param_norm")), alone)
    # Each optimizer under one layout, in turn; the one with all there is under every one.
    for layout in LAYOUTS if name == "everything" else [list(LAYOUTS)[list(TABLE).index(name) % 4]]:
        mesh = LAYOUTS[layout][0]
        step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm", "param_norm"))
        state = create(layout, optimizer)
        before, first = shardings(state), state
        with compilations() as seen:
            state, got = run(step, state, lambda batch, mesh=mesh: jstep.shard_batch(batch, mesh))
        assert len(seen) == 1
        assert step._cache_size() == 1
        assert shardings(state) == before
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
        assert_close((state.params, state.slots), (want.params, want.slots))
        assert_close((got["grad_norm"], got["param_norm"]), (metrics["grad_norm"], metrics["param_norm"]), rtol=1e-3)
        assert int(state.global_step) == 50


@pytest.mark.parametrize("layout", LAYOUTS)
def test_microbatches_scans_and_random_numbers(layout):
    mesh = LAYOUTS[layout][0]
    optimizer = jstep.with_moving_average(
        jstep.chain(jstep.clip_gradients(by_global_norm=0.05), jstep.adam(0.01)), jstep.ExponentialMovingAverage(0.9)
    )

    def noisy(params, x, y, rng):
        return loss_fn(params, x + 0.1 * jax.random.normal(rng, x.shape), y), {"rows": x.shape[0] * jnp.ones(())}

    step = jstep.minimize(noisy, optimizer, has_aux=True, num_microbatches=4, rng=jax.random.key(3))
    want, metrics = run(step, jstep.TrainState.create(init(), optimizer), steps=12)
    scanned = jstep.scan_steps(step)
    state = create(layout, optimizer)
    before = shardings(state)
    batches = jstep.batches(data(), 32, seed=2)
    for first in (0, 4, 8):
        some = jax.tree.map(lambda *leaves: np.stack(leaves), *batches[first : first + 4])
        rows = NamedSharding(auto_mesh(mesh), P(None, "data"))
        state, got = scanned(state, *jax.device_put(some, rows))
    assert shardings(state) == before
    assert scanned._cache_size() == 1
    assert_close((state.params, state.slots), (want.params, want.slots))
    assert_close(got["loss"][-1], metrics["loss"])
    assert float(got["rows"][-1]) == 8


@pytest.mark.parametrize("specs", [None, P("data"), P(None, "data")])
def test_sparse_rows_of_a_table(specs):
    """Repeated rows, rows on every device, clipped by the norm of all."""
    optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=0.5), jstep.adagrad(0.1))

    def looked_up(state, indices, targets):
        grads = jax.grad(lambda rows: jnp.mean((rows - targets) ** 2))(state.params["table"][indices])
        slices = jstep.IndexedSlices(grads, indices, (64, 8))
        return jstep.apply_gradients(state, {"table": slices}, optimizer), {}

    random = np.random.default_rng(4)
    table = random.normal(size=(64, 8)).astype(np.float32)
    batches = [
        (random.integers(0, 64, 32).astype(np.int32), random.normal(size=(32, 8)).astype(np.float32)) for _ in range(50)
    ]
    want = jstep.TrainState.create({"table": table}, optimizer)
    state = jstep.TrainState.create({"table": table}, optimizer, mesh=DATA, param_specs=specs, slot_axis="data")
    before = shardings(state)
    alone = jax.jit(looked_up)
    step = jax.jit(looked_up, out_shardings=(before, None), donate_argnums=0)
    for batch in batches:
        want, _ = alone(want, *batch)
        state, _ = step(state, *jstep.shard_batch(batch, DATA))
    assert_close((state.params, state.slots), (want.params, want.slots))
    assert shardings(state) == before


def test_loop_with_several_steps_in_a_call(tmp_path):
    """The same loop, one argument more."""
    optimizer = jstep.momentum(0.05, 0.9)
    batches = jstep.batches(data(), 32, seed=2)
    want, _ = run(jstep.minimize(loss_fn, optimizer), jstep.TrainState.create(init(), optimizer), steps=23)
    state = jstep.train(
        jstep.minimize(loss_fn, optimizer),
        create("fsdp", optimizer),
        batches,
        23,
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=10,
        steps_per_call=4,
        batch_sharding=NamedSharding(AUTO, P("data")),
        progress=False,
    )
    assert_close(state.params, want.params)
    assert jstep.Saver(tmp_path).all_steps() == [10, 20, 23]


# --- where things lie -----------------------------------------------------------------------------------------------


def bytes_on(device, tree):
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def test_bytes_on_each_device():
    """Adam of 2048 + 256 numbers, all of which divide by 8."""
    params = lambda: {"w": jnp.ones((64, 32)), "v": jnp.ones((32, 8))}  # noqa: E731
    whole, step_bytes = 4 * (64 * 32 + 32 * 8), 4
    layouts = {
        "data": ({}, whole, 2 * whole),
        "zero1": ({"slot_axis": "data"}, whole, 2 * whole // 8),
        "fsdp": ({"param_specs": P("data")}, whole // 8, 2 * whole // 8),
    }
    for how, of_params, of_slots in layouts.values():
        state = jstep.TrainState.create(params, jstep.adam(), mesh=DATA, **how)
        step = jstep.minimize(lambda p, x: jnp.mean((x @ p["w"] @ p["v"]) ** 2), jstep.adam())
        for _ in range(2):
            for device in DATA.devices.flat:
                assert bytes_on(device, state.params) == of_params
                assert bytes_on(device, state.slots) == of_slots + step_bytes
            state, _ = step(state, jstep.shard_batch(np.ones((8, 64), np.float32), DATA))


def test_no_device_holds_a_whole_that_is_made_under_a_mesh():
    """The program that makes it: results and everything between fit an eighth of the whole, and a bit."""
    made = []

    def big():
        made.append(True)
        keys = jax.random.split(jax.random.key(0), 4)
        return [jax.random.normal(key, (1024, 512)) for key in keys]

    held = {}

    def watch(make, place, *given):
        compiled = jax.jit(make, out_shardings=place(jax.eval_shape(make, *given))).lower(*given).compile()
        held.update(memory=compiled.memory_analysis(), text=compiled.as_text())
        return original(make, place, *given)

    original, jstep.sharding.layout.build = jstep.sharding.layout.build, watch
    try:
        state = jstep.TrainState.create(big, jstep.adam(), mesh=DATA, param_specs=P("data"))
    finally:
        jstep.sharding.layout.build = original
    whole = 3 * 4 * 4 * 1024 * 512  # parameters and two slots
    memory = held["memory"]
    assert memory.output_size_in_bytes < whole / 8 + 4096
    assert memory.temp_size_in_bytes < whole / 8
    assert "f32[1024,512]" not in held["text"]
    assert bytes_on(DATA.devices.flat[0], state) < whole / 8 + 4096
    # The numbers do not depend on how many devices make them.
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), jax.device_get(big()))


def test_slots_lie_as_their_parameters_do():
    def by_name(path, leaf):
        return "one" if path == "a" else "other"

    optimizer = jstep.with_moving_average(
        jstep.partition({"one": jstep.adagrad(0.1), "other": jstep.scope("s", jstep.adam(0.1))}, by_name),
        jstep.ExponentialMovingAverage(0.9),
    )
    state = create("model", optimizer, model_state={"deep": jnp.ones((8, 8)), "n": jnp.zeros((), jnp.int32)})
    spec = lambda slot, path: jstep.get_slot(state, slot, path).sharding.spec  # noqa: E731
    average = "ExponentialMovingAverage"
    assert spec("one/accumulator", "a") == spec(average, "a") == state.params["a"].sharding.spec == P(None, "model")
    assert spec("other/s/m", "bias") == P("model")
    assert spec("other/s/m", "deep/x") == P("model")
    assert spec("other/s/v", "deep/y") == P("data")  # replicated parameter: ZeRO-1, its largest dimension
    assert state.params["deep"]["y"].sharding.spec == P()
    assert spec("other/s/m", "scale") == P()
    assert jstep.get_slot(state, "one/accumulator", "bias") is None
    assert state.slots["model_state"]["deep"].sharding.spec == P()
    assert state.slots["other/s/start_step"].sharding.spec == P()
    assert state.global_step.sharding.spec == P()


def test_model_state_that_looks_like_the_parameters_is_on_every_device():
    state = jstep.TrainState.create({"w": jnp.ones(8)}, jstep.adam(), model_state={"w": jnp.ones(8)})
    state = jstep.shard_state(state, DATA, P("data"))
    assert state.slots["m"]["w"].sharding.spec == P("data")
    assert state.slots["model_state"]["w"].sharding.spec == P()


FORMS = {
    "one for all": P("data"),
    "a tree": {"w": P("data"), "v": {"k": P("data")}},
    "a prefix": {"w": P("data"), "v": P("data")},
    "None within": {"w": None, "v": {"k": P("data")}},
    "rules": [("v/*", P("data")), ("*", P())],
    "a tuple of rules": (("v/*", P("data")), ("v/k", P())),
    "a function": lambda path, leaf: P("data") if path == "v/k" and leaf.shape == (8, 2) else None,
}


@pytest.mark.parametrize("specs", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("how", ["shard_state", "create", "create from a function", "shapes"])
def test_every_form_of_param_specs(specs, how):
    params = {"w": jnp.ones((16, 2)), "v": {"k": jnp.ones((8, 2))}}
    if how == "shard_state":
        state = jstep.shard_state(jstep.TrainState.create(params, jstep.adam()), DATA, specs)
    elif how == "shapes":
        state = jstep.shard_state(jax.eval_shape(lambda: jstep.TrainState.create(params, jstep.adam())), DATA, specs)
    else:
        given = params if how == "create" else lambda: params
        state = jstep.TrainState.create(given, jstep.adam(), mesh=DATA, param_specs=specs)
    all_of_them = isinstance(specs, P) or (isinstance(specs, dict) and specs["w"] is not None)
    assert state.params["v"]["k"].sharding.spec == state.slots["m"]["v"]["k"].sharding.spec == P("data")
    assert state.params["w"].sharding.spec == (P("data") if all_of_them else P())
    assert set(state.params["w"].sharding.mesh.axis_types) == {AxisType.Auto}


def test_fsdp_specs():
    shapes = {"w": (64, 128), "tall": (256, 100), "odd": (63, 129), "square": (64, 64), "b": (8,), "s": ()}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    both = P(("data", "model"))
    assert jstep.fsdp_specs(params, BOTH, axis=("data", "model"), min_size=1) == {
        "w": P(None, *both),
        "tall": both,
        "odd": P(),
        "square": both,
        "b": both,
        "s": P(),
    }
    by_default = jstep.fsdp_specs(params | {"big": jnp.ones((256, 256))}, DATA)
    assert {name for name, spec in by_default.items() if spec != P()} == {"big"}
    assert jstep.fsdp_specs(params, DATA, min_size=64 * 64)["square"] == P("data")
    assert jstep.fsdp_specs(params, DATA, min_size=64 * 64 + 1)["square"] == P()


def test_what_was_laid_out_survives_its_source_and_the_other_way():
    """Donation takes the new state alone, whatever memory it might have shared."""
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(lambda p, x: jnp.mean((x @ p["w"]) ** 2), optimizer)
    batch = jstep.shard_batch(np.ones((8, 16), np.float32), DATA)
    array, zeros = np.ones((16, 4), np.float32), {"w": np.zeros((16, 4), np.float32)}
    sources = [
        jstep.TrainState.create({"w": jnp.ones((16, 4))}, optimizer),
        jstep.TrainState.create({"w": jnp.ones((16, 4))}, optimizer, mesh=DATA),
        jstep.TrainState({"w": array}, {"m": zeros, "v": zeros, "start_step": np.int32(0)}, np.int32(0)),
    ]
    for source in sources:
        for laid in (
            jstep.shard_state(source, DATA),
            jstep.TrainState.create(source.params, optimizer, mesh=DATA),
            jstep.TrainState.create(source.params, optimizer, mesh=DATA, copy=False),
        ):
            step(laid, batch)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(laid))
            jax.tree.map(lambda leaf: np.asarray(leaf) + 1, source)  # none is deleted
    laid = jstep.TrainState.create({"w": array}, optimizer, mesh=DATA)
    array[:] = 7
    assert float(laid.params["w"].max()) == 1


def test_explicit_axes_are_taken_as_auto_axes():
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    optimizer = jstep.momentum(0.05, 0.9)
    batches = jstep.batches(data(), 32, seed=2)
    step = jstep.minimize(loss_fn, optimizer)
    results = []
    for mesh in (explicit, auto_mesh(explicit)):
        made = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=COLUMNS_AND_ROWS, slot_axis="data")
        moved = jstep.shard_state(jstep.TrainState.create(init(), optimizer), mesh, COLUMNS_AND_ROWS, slot_axis="data")
        assert shardings(made) == shardings(moved)
        where = NamedSharding(mesh, P("data"))
        state = jstep.train(step, made, batches, 3, batch_sharding=where, progress=False)
        state = jstep.train(step, state, batches, 6, batch_sharding=where, progress=False, steps_per_call=3)
        with jax.set_mesh(auto_mesh(mesh)):
            state = jstep.train(step, state, batches, 7, batch_sharding=P("data"), progress=False)
        results.append(jax.device_get(state.params))
    assert_close(results[0], results[1])


def test_shard_batch():
    batch = jstep.shard_batch({"x": np.arange(16.0).reshape(8, 2), "y": [1] * 8}["x"], BOTH, axis=("data", "model"))
    assert batch.sharding.spec == P(("data", "model"))
    assert [shard.data.shape for shard in batch.addressable_shards] == [(1, 2)] * 8
    batch = jstep.shard_batch((np.arange(8), jnp.ones((8, 3))), BOTH, axis="model")
    assert batch[0].sharding == batch[1].sharding == NamedSharding(auto_mesh(BOTH), P("model"))
    np.testing.assert_array_equal(batch[0], np.arange(8))
    again = jstep.shard_batch(batch, BOTH, axis="data")
    assert again[1].sharding.spec == P("data")


def test_batches_of_another_kind_need_no_other_step():
    """The shardings of the first batch decide how microbatches are split; others still go through."""
    optimizer = jstep.gradient_descent(0.1)

    def loss(params, batch):
        return jnp.mean((predict(params, batch["x"])) ** 2) + (jnp.mean(batch["y"]) if "y" in batch else 0.0)

    step = jstep.minimize(loss, optimizer, num_microbatches=4)
    state = jstep.TrainState.create(init, optimizer, mesh=DATA)
    x = data()[0]
    for batch in (
        jstep.shard_batch({"x": x}, DATA),
        jstep.shard_batch({"x": x, "y": x}, DATA),
        {"x": x},
        jstep.shard_batch({"x": x[:16]}, DATA),  # 4 rows in a microbatch, on 8 devices
    ):
        state, metrics = step(state, batch)
        assert np.isfinite(float(metrics["loss"]))
    few, _ = step(jstep.shard_state(state, DATA), jstep.shard_batch({"x": x[:16]}, DATA))
    assert int(few.global_step) == 5


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_checkpoints_go_from_one_layout_to_every_other(tmp_path):
    """Saved under each, restored under each, bitwise."""
    optimizer = jstep.adam(0.01)
    makers = {
        "one device": lambda: jstep.TrainState.create(init(), optimizer),
        "fsdp": lambda: create("fsdp", optimizer),
        "model": lambda: create("model", optimizer),
    }
    step = jstep.minimize(loss_fn, optimizer)
    for source, make in makers.items():
        state, _ = run(step, make(), steps=1)
        with jstep.Saver(tmp_path / source) as saver:
            saver.save(state)
            for target, other in makers.items():
                if target == source:
                    continue
                wanted = other()
                restored = saver.restore(wanted)
                jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
                if target != "one device":
                    assert shardings(restored) == shardings(wanted)
                shapes = jax.eval_shape(lambda: jstep.TrainState.create(init(), optimizer))
                if target == "fsdp":
                    laid = jstep.shard_state(shapes, *[LAYOUTS["fsdp"][0]], **LAYOUTS["fsdp"][1])
                    assert shardings(saver.restore(laid)) == shardings(wanted)


# --- the compiled program -------------------------------------------------------------------------------------------


def collectives(step, state, batch):
    """(kind, shapes) of every collective in the compiled program."""
    text = step.lower(state, *batch).compile().as_text()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\(.*?\)|\S+) ({kinds})(?:-start)?\(", text)
    return [(kind, re.findall(r"\w+\[[\d,]*\]", shapes)) for shapes, kind in found]


def test_data_parallel_has_one_reduction_and_nothing_else():
    """All gradients and the loss in one message; clipping and averages add none."""
    optimizer = TABLE["everything"].make(0.1)
    state = jstep.TrainState.create(init, optimizer, mesh=DATA)
    step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm", "update_norm", "param_norm"))
    (kind, shapes), *rest = collectives(step, state, jstep.shard_batch(data(), DATA))
    assert not rest
    assert kind == "all-reduce"
    sizes = sorted(math.prod(map(int, re.findall(r"\d+", shape.removeprefix("f32")))) for shape in shapes)
    assert sizes == sorted([*(leaf.size for leaf in jax.tree.leaves(state.params)), 1])


def test_zero1_gathers_each_parameter_once():
    state = create("zero1", jstep.adam(0.1))
    found = collectives(jstep.minimize(loss_fn, jstep.adam(0.1)), state, jstep.shard_batch(data(), DATA))
    kinds = [kind for kind, _ in found]
    assert kinds.count("all-reduce") == 1
    assert kinds.count("all-gather") == 4  # every parameter but the scalar, whose slots are not split
    assert set(kinds) == {"all-reduce", "all-gather"}


def test_tensor_parallel_reduces_activations_and_gathers_nothing():
    optimizer = jstep.adam(0.1)
    state = jstep.TrainState.create(init, optimizer, mesh=BOTH, param_specs=COLUMNS_AND_ROWS)
    found = collectives(jstep.minimize(loss_fn, optimizer), state, jstep.shard_batch(data(), BOTH))
    assert [kind for kind, _ in found] == ["all-reduce"] * 2
    assert sorted(len(shapes) for _, shapes in found) == [1, 6]  # rows of h @ x; the gradients and the loss


# --- bad input ------------------------------------------------------------------------------------------------------

STATE = {"w": jnp.ones((16, 4)), "v": {"k": jnp.ones(6)}}


@pytest.mark.parametrize("how", ["shard_state", "create", "create from a function"])
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"param_specs": P("dta")}, ValueError, ["no axis 'dta'", "nearest: 'data'", "{'data': 8}"]),
        ({"param_specs": [("v/*", P("data"))]}, ValueError, ["'v/k'", "dimension 0 of shape (6,)", "8 parts"]),
        ({"param_specs": P("data", None, None)}, ValueError, ["3 dimensions", "shape (6,)", "'v/k'"]),
        ({"param_specs": [("w", P("data", "data"))]}, ValueError, ["'w'", "twice"]),
        ({"param_specs": [("v/z", P())]}, ValueError, ["the rule 'v/z' matches no parameter", "nearest: 'v/k'"]),
        ({"param_specs": {"w": P()}}, ValueError, ["structure of params", "['v/k', 'w']"]),
        ({"param_specs": {"w": P(), "v": {"k": "data"}}}, TypeError, ["'v/k'", "'data'", "PartitionSpec"]),
        ({"param_specs": lambda path, leaf: "data"}, TypeError, ["'v/k'", "'data'"]),
        ({"slot_axis": "model"}, ValueError, ["slot_axis='model'", "no axis 'model'"]),
        ({"slot_axis": ["data"]}, TypeError, ["slot_axis=['data']", "tuple of names"]),
    ],
)  # fmt: skip
def test_bad_layouts_name_axis_leaf_and_size(how, arguments, kind, words):
    def lay_out():
        if how == "shard_state":
            return jstep.shard_state(jstep.TrainState.create(STATE, jstep.adam()), DATA, **arguments)
        params = STATE if how == "create" else lambda: STATE
        return jstep.TrainState.create(params, jstep.adam(), mesh=DATA, **arguments)

    with pytest.raises(kind) as caught:
        lay_out()
    for word in words:
        assert word in str(caught.value)


def test_bad_meshes_and_states():
    for mesh in (None, "data", DATA.devices, DATA.abstract_mesh):
        with pytest.raises(TypeError, match=r"(?s)mesh=.*must be a jax\.sharding\.Mesh"):
            jstep.shard_state(jstep.TrainState.create(STATE, jstep.adam()), mesh)
    with pytest.raises(TypeError, match="must be a TrainState, got dict"):
        jstep.shard_state(STATE, DATA)
    with pytest.raises(ValueError, match="give mesh as well"):
        jstep.TrainState.create(STATE, jstep.adam(), slot_axis="data")
    with pytest.raises(ValueError, match="no axis 'rows'"):
        jstep.fsdp_specs(STATE, DATA, axis="rows")
    with pytest.raises(ValueError, match="min_size=-1"):
        jstep.fsdp_specs(STATE, DATA, min_size=-1)
    with pytest.raises(TypeError, match=r"min_size=0\.5"):
        jstep.fsdp_specs(STATE, DATA, min_size=0.5)


def test_bad_batches():
    with pytest.raises(ValueError, match=r"'x' has 12 rows .* 8 parts .* 'data' .* multiple of 8"):
        jstep.shard_batch({"x": np.ones((12, 2))}, DATA)
    with pytest.raises(ValueError, match="no axis 'rows'"):
        jstep.shard_batch(np.ones(8), DATA, axis="rows")
    with pytest.raises(ValueError, match=r"8 at 'x', 16 at 'y'"):
        jstep.shard_batch({"x": np.ones(8), "y": np.ones(16)}, DATA)
    with pytest.raises(ValueError, match="scalar"):
        jstep.shard_batch({"x": np.float32(1)}, DATA)
    optimizer = jstep.adam()
    with pytest.raises(ValueError, match=r"'0' has shape \(12, 16\) .* multiple of 8 rows"):
        jstep.train(
            jstep.minimize(loss_fn, optimizer),
            create("data", optimizer),
            jstep.batches(data(), 12),
            3,
            batch_sharding=NamedSharding(AUTO, P("data")),
            progress=False,
        )
    explicit = jax.device_put(data(), NamedSharding(jax.make_mesh((8,), ("data",)), P("data")))
    state = create("data", optimizer)
    with pytest.raises(ValueError) as caught:
        jstep.minimize(loss_fn, optimizer)(state, *explicit)
    assert any("jstep.shard_batch" in note for note in caught.value.__notes__)


def test_a_donated_state_is_named():
    step = jstep.minimize(loss_fn, jstep.adam())
    state = create("fsdp", jstep.adam())
    batch = jstep.shard_batch(data(), DATA)
    step(state, *batch)
    with pytest.raises(RuntimeError, match=r"'params/a' was donated"):
        step(state, *batch)
