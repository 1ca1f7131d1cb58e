"""Each device reads only its part of a file, and no byte is read twice; a fixture records all reads."""

import builtins
import io
import json

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors_files import same, write_arrays

import jstep
from jstep.weights import load

ROWS = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
LONG_ROWS = np.arange(8 * 2**14, dtype=np.float32).reshape(8, 2**14)
"""Parts of its rows are so long that each one is read separately; shorter ones are read together."""


class RecordedFile(io.FileIO):
    """An unbuffered safetensors file that appends (tensor, first byte, number of bytes) of its reads to a list."""

    def __init__(self, path, reads):
        super().__init__(path)
        self._reads = reads
        header = super().read(int.from_bytes(super().read(8), "little"))
        self._data = self.tell()
        self._offsets = {name: tensor["data_offsets"] for name, tensor in json.loads(header).items()}
        self.seek(0)

    def readinto(self, buffer):
        start = self.tell() - self._data
        count = super().readinto(buffer)
        name, begin = next((name, begin) for name, (begin, end) in self._offsets.items() if begin <= start < end)
        self._reads.append((name, start - begin, count))
        return count


@pytest.fixture
def reads(monkeypatch):
    """A list of (tensor, first byte, number of bytes) of all reads from files without a buffer."""
    reads, original = [], open

    def recorded(path, mode="r", buffering=-1, *args, **options):
        is_recorded = mode == "rb" and buffering == 0
        return RecordedFile(path, reads) if is_recorded else original(path, mode, buffering, *args, **options)

    monkeypatch.setattr(builtins, "open", recorded)
    return reads


def mesh(*types, shape=(8,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(*types,))


KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
SPECS = [P("data"), P(None, "data"), P("model"), P("data", "model"), P(("data", "model")), P(), P("model", "data")]


@KINDS
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rows", [ROWS, LONG_ROWS], ids=["merged runs", "separate runs"])
def test_every_byte_is_read_once(tmp_path, reads, kind, spec, rows):
    path = write_arrays(tmp_path / "model.safetensors", a=rows, b=rows + 1)
    sharding = NamedSharding(mesh(kind, kind, shape=(4, 2), names=("data", "model")), spec)
    target = {name: jax.ShapeDtypeStruct(rows.shape, np.float32, sharding=sharding) for name in "ab"}
    loaded = jstep.load_weights(path, target)
    assert sum(size for _, _, size in reads) == 2 * rows.nbytes
    covered = np.zeros(rows.nbytes, np.uint8)
    for name, start, size in reads:
        covered[start : start + size] += name == "a"
    assert (covered == 1).all()
    assert same(loaded["a"], rows)
    assert loaded["b"].sharding == sharding
    for shard in loaded["b"].addressable_shards:
        assert same(shard.data, (rows + 1)[shard.index])
    if spec == P(None, "data"):
        assert len(reads) == 2 * (1 if rows is ROWS else 4 * len(rows))


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 0), (2, 3, 4, 5), (1, 1, 7)], ids=str)
def test_parts_of_arrays_of_any_shape(tmp_path, shape):
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    path = write_arrays(tmp_path / "model.safetensors", before=ROWS, a=array)
    (tensor,) = (t for t in jstep.weights.files.read_headers(path).tensors.values() if t.name == "a")
    rng = np.random.default_rng(0)
    for _ in range(30):
        part = tuple(tuple(sorted(rng.integers(0, size + 1, 2))) for size in shape)
        part = tuple((int(begin), int(end)) for begin, end in part)
        with open(path, "rb", buffering=0) as file:
            (loaded,) = load.read_parts(file, tensor, [part])
        assert same(loaded, array[tuple(slice(*one) for one in part)])


def test_unused_tensors_are_not_read(tmp_path, reads):
    path = write_arrays(tmp_path / "model.safetensors", a=ROWS, b=ROWS, c=ROWS)
    jstep.load_weights(path, {"b": np.zeros((64, 32), np.float32)}, partial=True)
    assert {name for name, _, _ in reads} == {"b"}
    reads.clear()
    with pytest.raises(ValueError, match="mismatched"):
        jstep.load_weights(path, {"a": np.zeros((64, 32), np.float32), "b": np.zeros(3), "c": np.zeros((64, 32))})
    assert not reads


def test_loaded_arrays_do_not_map_the_file(tmp_path):
    """On the CPU, device_put of a memory map would alias the file, and a later save in place change the weights."""
    path = tmp_path / "model.safetensors"
    write_arrays(path, a=ROWS)
    on_rows = NamedSharding(mesh(AxisType.Auto), P("data"))
    targets = [np.zeros_like(ROWS), jax.ShapeDtypeStruct(ROWS.shape, np.float32)]
    targets.append(jax.ShapeDtypeStruct(ROWS.shape, np.float32, sharding=on_rows))
    loaded = [jstep.load_weights(path, {"a": target})["a"] for target in targets]
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert all(same(array, ROWS) for array in loaded)


@pytest.mark.thorough
def test_loaded_arrays_may_be_donated(tmp_path):
    path = write_arrays(tmp_path / "model.safetensors", a=ROWS)
    for spec in (P("data"), P()):
        sharding = NamedSharding(mesh(AxisType.Auto), spec)
        loaded = jstep.load_weights(path, {"a": jax.ShapeDtypeStruct(ROWS.shape, np.float32, sharding=sharding)})["a"]
        pointers = {shard.data.unsafe_buffer_pointer() for shard in loaded.addressable_shards}
        assert len(pointers) == 8
        added = jax.jit(lambda x: x + 1, donate_argnums=0)(loaded)
        assert loaded.is_deleted()
        assert {shard.data.unsafe_buffer_pointer() for shard in added.addressable_shards} == pointers
        assert same(added, ROWS + 1)
