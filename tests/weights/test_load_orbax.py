"""`load_weights` reads what Orbax and jstep wrote, as it reads safetensors files; Orbax reads what
jstep wrote."""

import logging
import os
import shutil
import sys
import types

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import run
from safetensors_files import same

import jstep

RNG = np.random.default_rng(0)
PARAMS = {
    "dense": {
        "kernel": RNG.normal(size=(8, 16)).astype(np.float32),
        "bias": np.arange(16, dtype=jnp.bfloat16),
    },
    "layers": [RNG.normal(size=(8,)).astype(np.float32), (np.arange(8, dtype=np.int8),)],
    "count": np.int32(7),
}
"""No array is constant: Orbax does not store constants under some options."""
SHAPES = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), PARAMS)


def on_devices(tree):
    return jax.tree.map(jnp.asarray, tree)


def standard(path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, on_devices(PARAMS))
    return path


def pytree(path, **options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, on_devices(PARAMS))
    return path


def step_of_manager(path, **items):
    with ocp.CheckpointManager(path) as manager:
        arguments = ocp.args.StandardSave(on_devices(PARAMS))
        manager.save(
            7, args=ocp.args.Composite(**dict.fromkeys(items, arguments)) if items else arguments
        )
        manager.wait_until_finished()
    return path / "7"


def own(path):
    with jstep.Saver(path) as saver:
        return saver.save(jstep.TrainState.create(PARAMS, jstep.adam()))


WRITERS = {
    "StandardCheckpointer": standard,
    "PyTreeCheckpointer": pytree,
    "a file for each chunk": lambda path: pytree(path, use_ocdbt=False),
    "zarr3": lambda path: pytree(path, use_zarr3=True),
    "CheckpointManager": step_of_manager,
    "one item": lambda path: step_of_manager(path, items=PARAMS),
    "the default of two items": lambda path: step_of_manager(path, default=PARAMS, other=PARAMS),
    "jstep": own,
    "jstep, renamed": lambda path: shutil.move(own(path), path / "pretrained"),
}


@pytest.mark.thorough(except_for=["StandardCheckpointer", "CheckpointManager", "jstep, renamed"])
@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_round_trips_bitwise(tmp_path, writer):
    path = WRITERS[writer](tmp_path / "checkpoint")
    for target in (SHAPES, PARAMS):
        loaded = jstep.load_weights(path, target)
        assert jax.tree.structure(loaded) == jax.tree.structure(PARAMS)
        jax.tree.map(lambda x, y: same(x, y) or pytest.fail(f"{x} {y}"), loaded, PARAMS)
        assert all(
            isinstance(leaf, np.ndarray) is (target is PARAMS) for leaf in jax.tree.leaves(loaded)
        )


@pytest.fixture(params=["StandardCheckpointer", "jstep"])
def path(request, tmp_path):
    return WRITERS[request.param](tmp_path / "checkpoint")


@pytest.mark.thorough(except_for=["StandardCheckpointer-auto", "jstep-explicit"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shardings_and_dtypes_of_the_target(path, kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    specs = {
        "dense": {"kernel": P("data", "model"), "bias": P("model")},
        "layers": [P("data"), (P(),)],
        "count": P(),
    }
    for dtype in (None, jnp.float16):
        target = jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
            ),
            SHAPES,
            specs,
        )
        loaded = jstep.load_weights(path, target, dtype=dtype)
        for leaf, expected, shape in zip(
            *map(jax.tree.leaves, (loaded, PARAMS, target)), strict=True
        ):
            assert leaf.sharding == shape.sharding
            is_cast = dtype is not None and jnp.issubdtype(expected.dtype, jnp.floating)
            assert same(leaf, expected.astype(dtype) if is_cast else expected)


class TestTrainingStates:
    """A checkpoint that holds more than weights."""

    @pytest.fixture
    def path(self, tmp_path):
        params = {"a": jnp.arange(3.0), "b": jnp.arange(2.0)}
        state = {"params": params, "opt_state": optax.adam(1e-3).init(params), "step": jnp.int32(3)}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(
                tmp_path / "x",
                state | {"other": {"x": {"a": jnp.arange(3.0) + 1, "b": jnp.ones(2)}}},
            )
        return tmp_path / "x"

    def shapes(self):
        return {
            "a": jax.ShapeDtypeStruct((3,), np.float32),
            "b": jax.ShapeDtypeStruct((2,), np.float32),
        }

    def test_params_may_be_omitted(self, path):
        for target, names in (
            (self.shapes(), None),
            (self.shapes(), {"a": "params/a"}),
            (self.shapes(), lambda path: f"params/{path}"),
            ({"params": self.shapes()}, None),
        ):
            loaded = jstep.load_weights(path, target, names)
            assert loaded.get("params", loaded)["a"].tolist() == [0, 1, 2]
        with pytest.raises(ValueError, match=r"unused \(1\): 'params/b';"):
            jstep.load_weights(path, {"a": self.shapes()["a"]})

    def test_names_that_add_a_group(self, path):
        loaded = jstep.load_weights(path, {"x": self.shapes()}, lambda path: "other/" + path)
        assert loaded["x"]["a"].tolist() == [1, 2, 3]


def test_flax_nnx_variables(tmp_path):
    model = flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(0))
    state = flax.nnx.state(model)
    pure = flax.nnx.to_pure_dict(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "variables", state)
        checkpointer.save(tmp_path / "pure", pure)
    for name, other, names in (
        ("variables", pure, lambda path: path + "/value"),
        ("pure", state, lambda path: path.removesuffix("/value")),
    ):
        target = jax.eval_shape(lambda other=other: other)
        loaded = jstep.load_weights(tmp_path / name, target, names)
        assert jax.tree.structure(loaded) == jax.tree.structure(other)
        assert all(map(same, jax.tree.leaves(loaded), jax.tree.leaves(other)))
    assert same(
        jstep.load_weights(tmp_path / "variables", state)["kernel"].get_value(),
        model.kernel.get_value(),
    )


class TestKeys:
    """Typed PRNG keys are loaded as their data."""

    @pytest.fixture
    def state(self):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        keys = jax.device_put(
            jax.random.split(jax.random.key(3), 8), NamedSharding(mesh, P("data"))
        )
        return {"keys": keys, "one": jax.random.key(5, impl="rbg"), "w": jnp.arange(3.0)}

    def test_keys_round_trip_with_their_sharding(self, tmp_path, state):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "orbax", {"params": state})
        with jstep.Saver(tmp_path / "jstep") as saver:
            path = saver.save({"params": state, "global_step": 1})
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        for source in (tmp_path / "orbax", path):
            for target in (state, shapes, jax.eval_shape(lambda: state)):
                loaded = jstep.load_weights(source, target)
                for name in ("keys", "one"):
                    assert loaded[name].dtype == state[name].dtype
                    assert same(jax.random.key_data(loaded[name]), jax.random.key_data(state[name]))
            assert jstep.load_weights(source, shapes)["keys"].sharding == state["keys"].sharding


class TestBadInput:
    """Errors name the path, and nothing is loaded."""

    def test_names_that_match_nothing(self, path, caplog):
        for names in ({"count": "nowhere/count"}.get, lambda path: f"nowhere/{path}"):
            with pytest.raises(
                ValueError,
                match=r"missing \(\d\): .*; unused \(\d+\): '(params/)?count'",
            ):
                jstep.load_weights(path, SHAPES, names)
        with caplog.at_level(logging.WARNING, "jstep"):
            kept = jstep.load_weights(path, PARAMS, lambda path: f"nowhere/{path}", partial=True)
        assert "does not fit target, and nothing was loaded; missing (5)" in caplog.text
        assert all(map(same, jax.tree.leaves(kept), jax.tree.leaves(PARAMS)))
        with pytest.raises(
            ValueError, match="names: target has no leaf at 'cuont'; nearest: 'count'"
        ):
            jstep.load_weights(path, SHAPES, {"cuont": "count"})

    def test_directories_of_checkpoints(self, tmp_path):
        step_of_manager(tmp_path / "manager")
        own(tmp_path / "own")
        for name in ("manager", "own"):
            with pytest.raises((FileNotFoundError, ValueError), match="pass the path of one"):
                jstep.load_weights(tmp_path / name, SHAPES)

    def test_several_items(self, tmp_path):
        path = step_of_manager(tmp_path / "manager", one=PARAMS, two=PARAMS)
        with pytest.raises(
            ValueError,
            match=r"several items or checkpoints \(one, two\); pass the path of one",
        ):
            jstep.load_weights(path, SHAPES)
        assert same(jstep.load_weights(path / "two", SHAPES)["count"], PARAMS["count"])

    def test_an_unfinished_save(self, tmp_path):
        os.rename(standard(tmp_path / "x"), tmp_path / "x.orbax-checkpoint-tmp")
        for path, message in (
            (tmp_path / "x.orbax-checkpoint-tmp", "is incomplete"),
            (tmp_path, "not a complete"),
        ):
            with pytest.raises((FileNotFoundError, ValueError), match=message):
                jstep.load_weights(path, SHAPES)

    @pytest.mark.parametrize(
        "text", ["", "{}", "[]", '{"tree_metadata": {"(\'a\',)": 3}}', "[" * 100_000]
    )
    def test_metadata_of_another_version(self, tmp_path, text):
        (standard(tmp_path / "x") / "_METADATA").write_text(text)
        with pytest.raises(ValueError, match=r"is corrupted, incomplete, or not readable by Orbax"):
            jstep.load_weights(tmp_path / "x", SHAPES)


def test_orbax_reads_what_jstep_wrote(tmp_path):
    optimizer = jstep.with_moving_average(jstep.adam(), jstep.ExponentialMovingAverage(0.9))
    state = jstep.TrainState.create(PARAMS, optimizer, global_step=3)
    with jstep.Saver(tmp_path) as saver:
        path = saver.save(state)
    expected = {jstep_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(state)}
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata.tree
        assert metadata.keys() == expected.keys()
        restored = checkpointer.restore(
            path, jax.tree.map(ocp.utils.to_shape_dtype_struct, expected)
        )
    assert all(same(restored[name], leaf) for name, leaf in expected.items())
    with ocp.PyTreeCheckpointer() as checkpointer:
        arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in expected}
        restored = checkpointer.restore(path, restore_args=arguments)
    assert all(same(restored[name], leaf) for name, leaf in expected.items())


def jstep_path(keys):
    return "/".join(
        str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))) for key in keys
    )


TWO_PROCESSES = """
shape = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=rows)
loaded = jstep.load_weights(f"{directory}/{process}", {"w": shape}, dtype=jnp.bfloat16)
for shard in loaded["w"].addressable_shards:
    print("result", shard.index[0].start, np.asarray(shard.data, np.float32).ravel().tolist())
"""


@pytest.mark.thorough
def test_two_processes_read_their_parts(tmp_path):
    w = jnp.arange(32.0).reshape(8, 4)
    sharding = NamedSharding(jax.make_mesh((4,), ("data",)), P("data"))
    for process in range(2):
        path = tmp_path / str(process)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
            checkpointer.save(path, {"w": jax.device_put(w, sharding)})
        for chunk in range(4):
            if chunk // 2 != process:  # of the other process
                os.remove(path / "w" / f"{chunk}.0")
    for process, lines in enumerate(run(TWO_PROCESSES, 2, tmp_path)):
        found = [line.removeprefix("result ") for line in lines if line.startswith("result ")]
        starts = (4 * process, 4 * process + 2)
        assert found == [
            f"{start} {np.asarray(w[start : start + 2]).ravel().tolist()}" for start in starts
        ]


def test_orbax_with_its_functions_at_the_top_level_is_read_too(tmp_path, monkeypatch):
    """As Orbax has announced for 1.0; the functions are those of today's `orbax.checkpoint.v1`."""
    path = standard(tmp_path / "orbax")
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    kernel = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)
    target = SHAPES | {"dense": SHAPES["dense"] | {"kernel": kernel}}
    expected = jstep.load_weights(path, SHAPES)
    top_level = types.ModuleType("orbax.checkpoint")
    vars(top_level).update(
        {name: getattr(ocp.v1, name) for name in ("metadata", "load", "PLACEHOLDER")}
    )
    top_level.__version__ = "1.0"
    monkeypatch.setattr(orbax, "checkpoint", top_level)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", top_level)
    for found, leaf in zip(
        jax.tree.leaves(jstep.load_weights(path, SHAPES)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(found, leaf)
    sharded = jstep.load_weights(path, target)["dense"]["kernel"]
    assert sharded.sharding == sharding
    np.testing.assert_array_equal(sharded, PARAMS["dense"]["kernel"])
    # Not arrays that are missing: Orbax raises for the first of them and closes its event loop, and
    # the reads of the others, which end later, call it: an error of no test, and so of the one that
    # happens to run.
    (path / "_METADATA").write_text("{")
    with pytest.raises(ValueError, match=r"not readable by Orbax 1\.0"):
        jstep.load_weights(path, SHAPES)
