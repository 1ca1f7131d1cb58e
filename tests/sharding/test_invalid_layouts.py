"""Invalid layouts, meshes and batches: errors name the axis, leaf and size."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import AUTO, DATA, create, data, loss_fn

import jstep

STATE = {"w": jnp.ones((16, 4)), "v": {"k": jnp.ones(6)}}


@pytest.mark.parametrize("entry_point", ["shard_state", "create", "create from a function"])
@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
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
def test_invalid_layouts_name_axis_leaf_and_size(entry_point, arguments, kind, parts):
    def create_sharded():
        if entry_point == "shard_state":
            return jstep.shard_state(jstep.TrainState.create(STATE, jstep.adam()), DATA, **arguments)
        params = STATE if entry_point == "create" else lambda: STATE
        return jstep.TrainState.create(params, jstep.adam(), mesh=DATA, **arguments)

    with pytest.raises(kind) as caught:
        create_sharded()
    for part in parts:
        assert part in str(caught.value)


def test_invalid_meshes_and_states():
    for mesh in (DATA.devices, DATA.abstract_mesh):
        with pytest.raises(TypeError, match=r"(?s)mesh=.*must be a jax\.sharding\.Mesh"):
            jstep.shard_state(jstep.TrainState.create(STATE, jstep.adam()), mesh)
    with pytest.raises(TypeError, match="must be a TrainState, got a dict"):
        jstep.shard_state(STATE, DATA)
    with pytest.raises(ValueError, match="give mesh as well"):
        jstep.TrainState.create(STATE, jstep.adam(), slot_axis="data")


def test_invalid_batches():
    with pytest.raises(ValueError, match=r"'x' has 12 rows .* 8 parts .* 'data' .* multiple of 8"):
        jstep.shard_batch({"x": np.ones((12, 2))}, DATA)
    with pytest.raises(ValueError, match=r"8 at 'x', 16 at 'y'"):
        jstep.shard_batch({"x": np.ones(8), "y": np.ones(16)}, DATA)
    with pytest.raises(ValueError, match="scalar"):
        jstep.shard_batch({"x": np.float32(1)}, DATA)
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
