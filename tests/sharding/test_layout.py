"""Sharding of states and batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import AUTO, BOTH, DATA, create, data, loss_fn

import jstep
from jstep.state.sharding import slot_sharding


def bytes_on(device, tree):
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def test_bytes_on_each_device():
    """Adam with 2048 + 256 parameters, in dimensions divisible by 8."""
    params = lambda: {"w": jnp.ones((64, 32)), "v": jnp.ones((32, 8))}  # noqa: E731
    total, step_bytes = 4 * (64 * 32 + 32 * 8), 4
    layouts = {
        "data": ({}, total, 2 * total),
        "zero1": ({"slot_axis": "data"}, total, 2 * total // 8),
        "fsdp": ({"param_specs": P("data")}, total // 8, 2 * total // 8),
    }
    for options, param_bytes, slot_bytes in layouts.values():
        state = jstep.TrainState.create(params, jstep.adam(), mesh=DATA, **options)
        for device in DATA.devices.flat:
            assert bytes_on(device, state.params) == param_bytes
            assert bytes_on(device, state.slots) == slot_bytes + step_bytes


@pytest.mark.thorough
def test_create_on_a_mesh_never_holds_the_full_state(monkeypatch):
    """Outputs and temporaries of the program that creates it take about an eighth of the state per
    device."""

    def big():
        keys = jax.random.split(jax.random.key(0), 4)
        return [jax.random.normal(key, (1024, 512)) for key in keys]

    program, original = {}, jstep.state.sharding.build

    def recording_build(make, place, *given, **options):
        compiled = (
            jax.jit(make, out_shardings=place(jax.eval_shape(make, *given))).lower(*given).compile()
        )
        program.update(memory=compiled.memory_analysis(), text=compiled.as_text())
        return original(make, place, *given, **options)

    monkeypatch.setattr(jstep.state.sharding, "build", recording_build)
    state = jstep.TrainState.create(big, jstep.adam(), mesh=DATA, param_specs=P("data"))
    total = 3 * 4 * 4 * 1024 * 512  # parameters and two slots
    memory = program["memory"]
    assert memory.output_size_in_bytes < total / 8 + 4096
    assert memory.temp_size_in_bytes < total / 8
    assert "f32[1024,512]" not in program["text"]
    assert bytes_on(DATA.devices.flat[0], state) < total / 8 + 4096
    # The values do not depend on the number of devices.
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), jax.device_get(big()))


def test_slots_are_sharded_like_their_parameters():
    def by_name(path, leaf):
        return "one" if path == "a" else "other"

    optimizer = jstep.with_moving_average(
        jstep.partition(
            {"one": jstep.adagrad(0.1), "other": jstep.scope(jstep.adam(0.1), "s")}, by_name
        ),
        jstep.ExponentialMovingAverage(0.9),
    )
    state = create(
        "model", optimizer, model_state={"deep": jnp.ones((8, 8)), "n": jnp.zeros((), jnp.int32)}
    )
    spec = lambda slot, path: jstep.get_slot(state, slot, path).sharding.spec  # noqa: E731
    average = "ExponentialMovingAverage"
    assert (
        spec("one/accumulator", "a")
        == spec(average, "a")
        == state.params["a"].sharding.spec
        == P(None, "model")
    )
    assert spec("other/s/m", "bias") == P("model")
    assert spec("other/s/m", "deep/x") == P("model")
    # The parameter is replicated: ZeRO-1 shards the largest dimension.
    assert spec("other/s/v", "deep/y") == P("data")
    assert state.params["deep"]["y"].sharding.spec == P()
    assert spec("other/s/m", "scale") == P()
    assert jstep.get_slot(state, "one/accumulator", "bias") is None
    assert state.slots["model_state"]["deep"].sharding.spec == P()
    assert state.slots["other/s/start_step"].sharding.spec == P()
    assert state.global_step.sharding.spec == P()


def test_model_state_stays_split_where_it_was_split_by_hand(tmp_path):
    """In steps and in a restore; another `shard_state` replicates it again."""
    optimizer, rows = jstep.adam(), NamedSharding(DATA, P("data"))

    def loss(params, world, x):
        return jnp.mean((x @ params["w"]) ** 2), {
            "buffer": world["buffer"] + 1.0,
            "n": world["n"] + 1,
        }

    def fresh():
        world = {"buffer": jnp.zeros((16, 2)), "n": jnp.zeros((), jnp.int32)}
        state = jstep.TrainState.create({"w": jnp.ones(8)}, optimizer, mesh=DATA, model_state=world)
        assert state.model_state["buffer"].sharding.spec == P()
        return state.replace(
            model_state=state.model_state | {"buffer": jax.device_put(jnp.zeros((16, 2)), rows)}
        )

    step = jstep.minimize(loss, optimizer, has_model_state=True)
    for last_step in (2, 4):
        state = jstep.train(
            step,
            fresh(),
            lambda step: np.ones((8, 8), np.float32),
            last_step,
            checkpoint_dir=tmp_path,
        )
        assert state.model_state["buffer"].sharding.is_equivalent_to(rows, 2)
        assert int(state.model_state["n"]) == last_step
    assert jstep.shard_state(state, DATA).model_state["buffer"].sharding.spec == P()


FORMS = {
    "one for all": P("data"),
    "a tree": {"w": P("data"), "v": {"k": P("data")}},
    "a prefix": {"w": P("data"), "v": P("data")},
    "None within": {"w": None, "v": {"k": P("data")}},
    "rules": [("v/*", P("data")), ("*", P())],
    "a function": lambda path, leaf: P("data") if path == "v/k" and leaf.shape == (8, 2) else None,
}


@pytest.mark.thorough(except_for=["shard_state-rules", "create from a function-a prefix"])
@pytest.mark.parametrize("specs", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "entry_point", ["shard_state", "create", "create from a function", "shapes"]
)
def test_forms_of_param_specs(specs, entry_point):
    params = {"w": jnp.ones((16, 2)), "v": {"k": jnp.ones((8, 2))}}
    if entry_point == "shard_state":
        state = jstep.shard_state(jstep.TrainState.create(params, jstep.adam()), DATA, specs)
    elif entry_point == "shapes":
        state = jstep.shard_state(
            jax.eval_shape(lambda: jstep.TrainState.create(params, jstep.adam())), DATA, specs
        )
    else:
        given = params if entry_point == "create" else lambda: params
        state = jstep.TrainState.create(given, jstep.adam(), mesh=DATA, param_specs=specs)
    shards_all = isinstance(specs, P) or (isinstance(specs, dict) and specs["w"] is not None)
    assert (
        state.params["v"]["k"].sharding.spec
        == state.slots["m"]["v"]["k"].sharding.spec
        == P("data")
    )
    assert state.params["w"].sharding.spec == (P("data") if shards_all else P())
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(state)} == {DATA}


def test_fsdp_specs():
    shapes = {
        "w": (64, 128),
        "tall": (256, 100),
        "odd": (63, 129),
        "square": (64, 64),
        "b": (8,),
        "s": (),
    }
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


def test_donating_a_sharded_state_keeps_its_source():
    """The new state shares no memory with its source."""
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(lambda p, x: jnp.mean((x @ p["w"]) ** 2), optimizer)
    batch = jstep.shard_batch(np.ones((8, 16), np.float32), DATA)
    array, zeros = np.ones((16, 4), np.float32), {"w": np.zeros((16, 4), np.float32)}
    sources = [
        jstep.TrainState.create({"w": jnp.ones((16, 4))}, optimizer),
        jstep.TrainState.create({"w": jnp.ones((16, 4))}, optimizer, mesh=DATA),
        jstep.TrainState(
            {"w": array}, {"m": zeros, "v": zeros, "start_step": np.int32(0)}, np.int32(0)
        ),
    ]
    for source in sources:
        for sharded in (
            jstep.shard_state(source, DATA),
            jstep.TrainState.create(source.params, optimizer, mesh=DATA),
            jstep.TrainState.create(source.params, optimizer, mesh=DATA, copy=False),
        ):
            step(sharded, batch)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(sharded))
            jax.tree.map(lambda leaf: np.asarray(leaf) + 1, source)  # no leaf is deleted
    sharded = jstep.TrainState.create({"w": array}, optimizer, mesh=DATA)
    array[:] = 7
    assert float(sharded.params["w"].max()) == 1


def test_shard_batch():
    batch = jstep.shard_batch(
        {"x": np.arange(16.0).reshape(8, 2), "y": [1] * 8}["x"], BOTH, axis=("data", "model")
    )
    assert batch.sharding.spec == P(("data", "model"))
    assert [shard.data.shape for shard in batch.addressable_shards] == [(1, 2)] * 8
    batch = jstep.shard_batch((np.arange(8), jnp.ones((8, 3))), BOTH, axis="model")
    assert batch[0].sharding == batch[1].sharding == NamedSharding(BOTH, P("model"))
    np.testing.assert_array_equal(batch[0], np.arange(8))
    again = jstep.shard_batch(batch, BOTH, axis="data")
    assert again[1].sharding.spec == P("data")


def test_shard_batch_copies_a_buffer_that_is_reused():
    for devices in (1, 4):
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        memory = np.zeros(64 * 1024 + 64, np.uint8)
        start = -memory.ctypes.data % 64  # aligned: an array on a CPU could use it without a copy
        buffer = memory[start : start + 64 * 1024].view(np.float32).reshape(64, 256)
        found = jstep.shard_batch({"x": buffer}, mesh)["x"]
        buffer[:] = 7.0
        assert not np.asarray(found).any()


# Invalid layouts, meshes and batches: errors name the axis, leaf and size.

STATE = {"w": jnp.ones((16, 4)), "v": {"k": jnp.ones(6)}}


@pytest.mark.parametrize("entry_point", ["shard_state", "create", "create from a function"])
@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        ({"param_specs": P("dta")}, ValueError, ["at 'v/k'", "not found in mesh: ('data',)"]),
        ({"param_specs": [("v/*", P("data"))]}, ValueError,
         ["'v/k'", "shape (6,)", "partitioned 8 times"]),
        ({"param_specs": P("data", None, None)}, ValueError,
         ["3 dimensions", "shape (6,)", "'v/k'"]),
        ({"param_specs": [("w", P("data", "data"))]}, ValueError, ["'w'", "duplicate entries"]),
    ],
)  # fmt: skip
def test_invalid_layouts_name_axis_leaf_and_size(entry_point, arguments, kind, parts):
    def create_sharded():
        if entry_point == "shard_state":
            return jstep.shard_state(
                jstep.TrainState.create(STATE, jstep.adam()), DATA, **arguments
            )
        params = STATE if entry_point == "create" else lambda: STATE
        return jstep.TrainState.create(params, jstep.adam(), mesh=DATA, **arguments)

    with pytest.raises(kind) as caught:
        create_sharded()
    for part in parts:
        assert part in str(caught.value)


def test_a_run_names_batches_that_do_not_divide():
    optimizer = jstep.adam()
    with pytest.raises(ValueError, match=r"partitioned 8 times, but the dimension size is 12"):
        jstep.train(
            jstep.minimize(loss_fn, optimizer),
            create("data", optimizer),
            jstep.batches(data(), 12),
            3,
            batch_sharding=NamedSharding(AUTO, P("data")),
            progress=False,
        )


# Sharding of slots whose shape differs from the parameter's, and of callable models.

MESH = BOTH

CASES = [
    ((8, 4), P("data", "model"), (8, 4), P("data", "model")),
    ((8, 4), P("data", "model"), (8,), P("data")),
    ((8, 4), P("data", "model"), (4,), P("model")),
    ((8, 4), P("data"), (4,), P()),
    ((2, 8, 4), P(None, "data", "model"), (2, 8), P(None, "data")),
    ((8, 8), P(None, "model"), (8,), P("model")),  # either axis may be the one dropped
    ((8, 8), P("data", "model"), (8, 1), P("data", None)),
    ((8, 4), P("data", "model"), (), P()),
    ((8, 4), P("data", "model"), (3, 5), P()),
]


@pytest.mark.parametrize(("shape", "spec", "slot", "want"), CASES)
def test_slots_drop_an_axis_of_the_sharding(shape, spec, slot, want):
    got = slot_sharding(NamedSharding(MESH, spec), shape, slot, None, None)
    assert got.is_equivalent_to(NamedSharding(MESH, want), len(slot))


@pytest.mark.thorough(except_for=["shape0", "shape3"])
@pytest.mark.parametrize("shape", [(8, 8), (4, 8, 8), (8, 8, 8), (8, 8, 4)])
def test_factored_slots_of_square_parameters(shape):
    second, largest = np.argsort(shape, kind="stable")[-2:]
    spec = [None] * len(shape)
    spec[second], spec[largest] = "data", "model"
    optimizer = jstep.scope(jstep.adafactor(0.1, min_dim_size_to_factor=1), "deep")
    state = jstep.TrainState.create(
        {"w": jnp.ones(shape)}, optimizer, mesh=MESH, param_specs=P(*spec)
    )
    for slot, axis in (("v_row", largest), ("v_col", second)):
        leaf = state.slots[f"deep/{slot}"]["w"]
        want = NamedSharding(MESH, P(*np.delete(np.array(spec, object), axis)))
        assert leaf.sharding.is_equivalent_to(want, leaf.ndim), slot


def test_factored_slots_of_replicated_parameters_are_split_if_divisible():
    optimizer = jstep.adafactor(0.1, min_dim_size_to_factor=1)
    state = jstep.TrainState.create(
        {"w": jnp.ones((16, 6))}, optimizer, mesh=DATA, slot_axis="data"
    )
    leaves = [state.slots[name]["w"] for name in ("v_row", "v_col")]
    assert {leaf.shape: leaf.sharding.is_fully_replicated for leaf in leaves} == {
        (16,): False,
        (6,): True,
    }
