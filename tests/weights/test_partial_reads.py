"""Each device gets its part of a file, which alone is read."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors_files import entry, same, write_arrays, write_raw

import jstep
from jstep.weights.tensors import read_header, read_parts

ROWS = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


def mesh(*types, shape=(8,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(*types,))


KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
SPECS = [P(None, "data"), P("data", "model"), P(("data", "model")), P()]


@KINDS
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_device_gets_its_part(tmp_path, kind, spec):
    path = write_arrays(tmp_path / "model.safetensors", a=ROWS, b=ROWS + 1)
    sharding = NamedSharding(mesh(kind, kind, shape=(4, 2), names=("data", "model")), spec)
    target = {
        name: jax.ShapeDtypeStruct(ROWS.shape, np.float32, sharding=sharding) for name in "ab"
    }
    loaded = jstep.load_weights(path, target)
    assert same(loaded["a"], ROWS)
    assert loaded["b"].sharding == sharding
    for shard in loaded["b"].addressable_shards:
        assert same(shard.data, (ROWS + 1)[shard.index])


def test_a_part_of_a_file_larger_than_memory(tmp_path):
    size = 2**42
    path = write_raw(tmp_path / "x", {"a": entry("F32", (4, size // 16), (0, size))})
    with open(path, "r+b") as file:
        start = file.seek(0, 2)
        file.seek(start + size // 2)
        file.write(np.float32([1, 2]).tobytes())
        file.truncate(start + size)
    part = ((2, 3), (0, 3))
    assert read_parts(read_header(path)["a"], [part])[part].tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 0), (2, 3, 4, 5), (1, 1, 7)], ids=str)
def test_parts_of_arrays_of_any_shape(tmp_path, shape):
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    path = write_arrays(tmp_path / "model.safetensors", before=ROWS, a=array)
    tensor = read_header(path)["a"]
    rng = np.random.default_rng(0)
    for _ in range(30):
        part = tuple(tuple(sorted(rng.integers(0, size + 1, 2))) for size in shape)
        part = tuple((int(begin), int(end)) for begin, end in part)
        assert same(read_parts(tensor, [part])[part], array[tuple(slice(*one) for one in part)])


def test_loaded_arrays_do_not_map_the_file(tmp_path):
    """On the CPU, device_put of a memory map would alias the file, and a later save in place change
    the weights."""
    path = tmp_path / "model.safetensors"
    write_arrays(path, a=ROWS)
    on_rows = NamedSharding(mesh(AxisType.Auto), P("data"))
    targets = [np.zeros_like(ROWS), jax.ShapeDtypeStruct(ROWS.shape, np.float32)]
    targets.append(jax.ShapeDtypeStruct(ROWS.shape, np.float32, sharding=on_rows))
    loaded = [jstep.load_weights(path, {"a": target})["a"] for target in targets]
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert all(same(array, ROWS) for array in loaded)
