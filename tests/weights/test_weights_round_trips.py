"""Round trips of every dtype, bitwise, with jstep, the safetensors package, and PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors_files import same

import jstep

FLOATS = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2]
FLOATS += [jnp.float8_e8m0fnu, jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz]
INTEGERS = [jnp.int8, jnp.int16, jnp.int32, jnp.uint8, jnp.uint16, jnp.uint32]
ALL = [*FLOATS, *INTEGERS, jnp.complex64]
WIDE = [np.int64, np.uint64, np.float64]


def random_bits(dtype, shape):
    """Return an array of random bits, which include NaNs with any payload, infinities and subnormals."""
    dtype = np.dtype(dtype)
    bits = np.random.default_rng(0).integers(0, 256, np.prod(shape, dtype=int) * dtype.itemsize, np.uint8)
    return bits.view(dtype).reshape(shape)


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("dtype", ALL, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (8, 24), (0, 3)], ids=str)
def test_round_trips_are_bitwise(tmp_path, dtype, shape):
    array = random_bits(dtype, shape)
    mesh = jax.make_mesh((8,), ("data",))
    specs = [P(), P("data"), P(None, "data")] if shape == (8, 24) else [P()]
    for spec in specs:
        placed = jax.device_put(array, NamedSharding(mesh, spec))
        path = jstep.save_weights(tmp_path / "model.safetensors", {"x": placed, "n": np.int8(3)})
        assert same(jstep.load_weights(path, {"x": placed, "n": np.int8(0)})["x"], array)
        shapes = {"x": jax.ShapeDtypeStruct(shape, dtype), "n": jax.ShapeDtypeStruct((), np.int8)}
        loaded = jstep.load_weights(path, shapes)
        assert same(loaded["x"], array)
        assert same(loaded["n"], np.int8(3))


@pytest.mark.parametrize("dtype", [bool, *WIDE], ids=lambda dtype: np.dtype(dtype).name)
def test_round_trips_of_bools_and_64_bits(tmp_path, dtype):
    array = random_bits(np.uint8, (3, 16)).view(np.int64).astype(bool) if dtype is bool else random_bits(dtype, (3, 2))
    path = jstep.save_weights(tmp_path / "x", {"x": array})
    assert same(jstep.load_weights(path, {"x": array})["x"], array)
    with jax.enable_x64(True):
        loaded = jstep.load_weights(path, {"x": jax.ShapeDtypeStruct(array.shape, array.dtype)})["x"]
        assert same(loaded, array)
        assert same(jstep.load_weights(jstep.save_weights(path, {"x": loaded}), {"x": array})["x"], array)


def test_safetensors_reads_files_of_jstep(tmp_path):
    arrays = {f"layer.{np.dtype(dtype).name}": random_bits(dtype, (3, 5)) for dtype in ALL}
    path = jstep.save_weights(tmp_path / "model.safetensors", arrays, max_shard_bytes=10**6)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(arrays)
        for name, array in arrays.items():
            assert tuple(file.get_slice(name).get_shape()) == array.shape
    raw = dict(safetensors.deserialize((tmp_path / "model.safetensors").read_bytes()))
    assert all(bytes(raw[name]["data"]) == array.tobytes() for name, array in arrays.items())


def test_jstep_reads_files_of_safetensors(tmp_path):
    arrays = {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "n": np.array(5),
        "mask": np.array([True, False, True]),
        "half": np.ones((2, 2), np.float16),
        "é/ü": np.zeros((0, 2), np.uint8),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", {"epoch": "3"})
    loaded = jstep.load_weights(tmp_path, arrays)
    assert all(same(loaded[name], array) for name, array in arrays.items())


@pytest.mark.thorough
def test_round_trips_of_float8_and_bfloat16_with_torch(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    kinds = {"bfloat16": jnp.bfloat16, "float8_e4m3fn": jnp.float8_e4m3fn, "float8_e5m2": jnp.float8_e5m2}
    tensors = {name: torch.linspace(-3, 3, 24).reshape(4, 6).to(getattr(torch, name)) for name in kinds}
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    shapes = {name: jax.ShapeDtypeStruct((4, 6), dtype) for name, dtype in kinds.items()}
    loaded = jstep.load_weights(tmp_path / "theirs.safetensors", shapes)
    reloaded = load_file(jstep.save_weights(tmp_path / "ours.safetensors", loaded))
    for name, tensor in tensors.items():
        assert np.asarray(loaded[name]).tobytes() == tensor.view(torch.uint8).numpy().tobytes()
        assert torch.equal(reloaded[name].view(torch.uint8), tensor.view(torch.uint8))
    as_floats = jstep.load_weights(tmp_path / "theirs.safetensors", shapes, dtype=np.float32)
    assert all((np.asarray(as_floats[name]) == tensor.float().numpy()).all() for name, tensor in tensors.items())
