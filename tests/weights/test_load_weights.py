"""`load_weights`: the tensor and dtype of each leaf, and errors for what does not fit."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import raising
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors_files import entry, same, write_arrays, write_raw

import jstep

W = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(4, dtype=np.float32)
SHAPES = {
    "dense": {
        "kernel": jax.ShapeDtypeStruct((4, 3), np.float32),
        "bias": jax.ShapeDtypeStruct((4,), np.float32),
    }
}
NAMES = {"dense/kernel": ("dense.weight", np.transpose), "dense/bias": "dense.bias"}


@pytest.fixture
def path(tmp_path):
    return write_arrays(tmp_path / "model.safetensors", **{"dense.weight": W, "dense.bias": B})


@pytest.mark.parametrize(
    "names", [NAMES, NAMES.get, lambda path: NAMES[path]], ids=["mapping", "get", "function"]
)
def test_names_as_mapping_or_function(path, names):
    for _ in range(2):
        loaded = jstep.load_weights(path, SHAPES, names)
        assert same(loaded["dense"]["kernel"], W.T)
        assert same(loaded["dense"]["bias"], B)
        assert isinstance(loaded["dense"]["kernel"], jax.Array)


def test_none_leaves_a_leaf_unchanged(path):
    target = {"w": jnp.zeros((3, 4)), "new": jnp.ones(2), "b": np.zeros(4, np.float32)}
    loaded = jstep.load_weights(
        path, target, {"w": "dense.weight", "b": "dense.bias", "new": None}.get
    )
    assert loaded["new"] is target["new"]
    assert same(loaded["w"], W)
    with pytest.raises(ValueError, match=r"'new' stays as it is.*a shape"):
        jstep.load_weights(
            path,
            {**target, "new": jax.ShapeDtypeStruct((2,), np.float32)},
            {"new": None},
            partial=True,
        )
    target["new"].delete()
    with pytest.raises(ValueError, match=r"'new' stays as it is.*a deleted array"):
        jstep.load_weights(path, target, {"w": "dense.weight", "b": "dense.bias", "new": None})


def test_one_error_lists_everything_that_does_not_fit(path, caplog):
    target = {
        "dense.weight": np.zeros((4, 3), np.float32),
        "dense.bias": jax.ShapeDtypeStruct((4,), np.int32),
        "x": [np.zeros(1), np.zeros(2)],
        "t": jnp.zeros((5, 4)),
    }
    names = {"x/1": "x.1", "t": ("dense.weight", lambda x: np.concatenate([x, x]))}
    with pytest.raises(ValueError, match="target does not fit") as caught:
        jstep.load_weights(path, target, names)
    for part in (
        "missing (2): 'x/0', 'x.1' (for 'x/1')",
        "mismatched (2): ",
        "'dense.weight' is float32[3,4], and float32[4,3] in target",
        "'dense.bias' is float32[4], and int32[4] in target",
    ):
        assert part in str(caught.value)
    with pytest.raises(
        ValueError,
        match=r"mismatched \(1\): 't' \(tensor 'dense.weight'\) is float32\[6,4\], and float3",
    ):
        jstep.load_weights(
            path, {"dense.bias": np.zeros(4, np.float32), "t": target["t"]}, {"t": names["t"]}
        )
    with pytest.raises(ValueError, match=r"unused \(2\): 'dense.weight', 'dense.bias'"):
        jstep.load_weights(path, {"dense": np.zeros(4)})


def test_error_of_a_transform_names_the_leaf(path):
    with pytest.raises(RuntimeError, match="no") as caught:
        jstep.load_weights(
            path, SHAPES, {**NAMES, "dense/kernel": ("dense.weight", raising(RuntimeError("no")))}
        )
    assert "'dense/kernel'" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="'dense/kernel' returned None"):
        jstep.load_weights(
            path, SHAPES, {**NAMES, "dense/kernel": ("dense.weight", lambda x: None)}
        )


@pytest.mark.parametrize(
    "transform", [np.transpose, jnp.transpose, lambda x: x.T, jax.jit(lambda x: x.T)]
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_transforms_on_a_mesh(path, transform, kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    kernel = jax.ShapeDtypeStruct((4, 3), np.float32, sharding=NamedSharding(mesh, P("data")))
    bias = jax.ShapeDtypeStruct((4,), np.float32, sharding=NamedSharding(mesh, P("model")))
    target = {"dense": {"kernel": kernel, "bias": bias}}
    names = {**NAMES, "dense/kernel": ("dense.weight", transform)}
    outside = jstep.load_weights(path, target, names)
    with jax.set_mesh(mesh):
        inside = jstep.load_weights(path, target, names)
    for loaded in (outside, inside):
        assert same(loaded["dense"]["kernel"], W.T)
        assert loaded["dense"]["kernel"].sharding == kernel.sharding
        assert loaded["dense"]["bias"].sharding == bias.sharding


# dtype.


def test_dtype_casts_only_floats_and_overrides_the_target(tmp_path):
    data = W.tobytes() + np.arange(2, dtype=np.int32).tobytes() + b"\1\0"
    header = {
        "w": entry("F32", (3, 4), (0, 48)),
        "n": entry("I32", (2,), (48, 56)),
        "m": entry("BOOL", (2,), (56, 58)),
    }
    path = write_raw(tmp_path / "x", header, data)
    target = {
        "w": jnp.zeros((3, 4), jnp.float16),
        "n": jnp.zeros(2, jnp.int32),
        "m": jnp.zeros(2, bool),
    }
    with pytest.raises(ValueError, match=r"'w' is float32\[3,4\], and float16\[3,4\] in target"):
        jstep.load_weights(path, target)
    for dtype in (jnp.bfloat16, "bfloat16", np.dtype(jnp.bfloat16)):
        loaded = jstep.load_weights(path, target, dtype=dtype)
        assert same(loaded["w"], W.astype(jnp.bfloat16))
        assert same(loaded["n"], np.arange(2, dtype=np.int32))
        assert same(loaded["m"], np.array([True, False]))
    with pytest.raises(ValueError, match=r"'n' is int32\[2\], and float32\[2\] in target"):
        jstep.load_weights(path, {**target, "n": jnp.zeros(2)}, dtype=np.float32)
    with pytest.raises(ValueError, match=r"'w' is float32\[3,4\], and int32\[3,4\] in target"):
        jstep.load_weights(path, {**target, "w": jnp.zeros((3, 4), jnp.int32)}, dtype=np.float32)


def test_overflow_in_a_cast_is_warned_about(tmp_path, caplog):
    path = write_arrays(tmp_path / "x", w=[1e5, -1e6, np.inf, 1.0, np.nan])
    with caplog.at_level(logging.WARNING, "jstep"):
        loaded = jstep.load_weights(path, {"w": np.zeros(5, np.float16)}, dtype=np.float16)
    assert loaded["w"].tolist()[:4] == [np.inf, -np.inf, np.inf, 1.0]
    assert "2 finite numbers of 'w'" in caplog.text


def test_64_bits_require_numpy_or_x64(tmp_path):
    path = write_raw(
        tmp_path / "x", {"n": entry("I64", (1,), (0, 8))}, (2**40).to_bytes(8, "little")
    )
    assert jstep.load_weights(path, {"n": np.zeros(1, np.int64)})["n"].tolist() == [2**40]
    with pytest.raises(ValueError, match="jax_enable_x64"):
        jstep.load_weights(path, {"n": jax.ShapeDtypeStruct((1,), np.int64)})
    with jax.enable_x64(True):
        loaded = jstep.load_weights(path, {"n": jnp.zeros(1, jnp.int64)})["n"]
        assert isinstance(loaded, jax.Array)
        assert loaded.tolist() == [2**40]


# partial.


def test_partial_loads_what_fits_and_logs_the_rest(path, caplog):
    mesh = jax.make_mesh((8,), ("data",))
    target = {
        "dense.weight": jnp.zeros((3, 4)),
        "dense.bias": jnp.full(5, 7.0),
        "new": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data"))),
        "t": np.ones(3, np.float32),
    }
    with caplog.at_level(logging.WARNING, "jstep"):
        loaded = jstep.load_weights(
            path, target, {"t": ("dense.bias", lambda x: x[:2])}, partial=True
        )
    assert same(loaded["dense.weight"], W)
    assert all(loaded[name] is target[name] for name in ("dense.bias", "new", "t"))
    (record,) = caplog.records
    for part in (
        "missing (1): 'new'",
        "'dense.bias' is float32[4], and float32[5]",
        "'t' (tensor 'dense.bias') is",
    ):
        assert part in record.getMessage()
    with pytest.raises(ValueError, match=r"'x' stays as it is.*a shape"):
        jstep.load_weights(path, {"x": jax.ShapeDtypeStruct((2,), np.float32)}, partial=True)
    with pytest.raises(TypeError, match="partial="):
        jstep.load_weights(path, target, partial="yes")


# Trees.


LEAF = np.zeros(4, np.float32)


def test_names_in_a_file_have_no_groups(tmp_path):
    """Only a checkpoint may hold more than weights."""
    path = write_arrays(tmp_path / "x", **{"params/w": B, "slots/w": B})
    with pytest.raises(ValueError, match=r"unused \(1\): 'slots/w'"):
        jstep.load_weights(path, {"params": {"w": LEAF}})
