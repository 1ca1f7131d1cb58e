"""The reader of chunks in files: it returns what tensorstore does, or nothing, and never other
bytes."""

import os
import random
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from jstep.array_store import array_writer
from jstep.array_store.array_reader import ArrayReader
from jstep.array_store.array_writer import CONFIG, OwnParts, merge, write
from jstep.array_store.chunk_files import ChunkFiles
from jstep.array_store.listing import directory_spec
from jstep.array_store.manifest import CorruptedCheckpointError, Leaf, Manifest, array_path


def result_of(future, nbytes):
    return future.result()


def manifest_of(arrays, parts=None, processes=1):
    leaves = [
        Leaf(name, (name,), x.shape, str(x.dtype), x.nbytes, name) for name, x in arrays.items()
    ]
    return Manifest(1, 0.0, tuple(leaves), parts=parts or {}, processes=processes)


def save(directory, arrays):
    base = directory_spec(str(directory))
    write(base, array_writer.take(arrays), result_of, first=True)
    return base, manifest_of(arrays)


@pytest.fixture
def without_tensorstore(monkeypatch):
    """Let tensorstore open no array: what is read then comes from the files."""

    def refuse(self, kinds):
        raise AssertionError(f"{list(kinds)} were left to tensorstore")

    monkeypatch.setattr(ArrayReader, "_open", refuse)


ARRAYS = {
    "scalar": np.float32(3),
    "small": np.arange(5, dtype=np.int8),
    "wide/name with spaces/ü": np.arange(4000, dtype=np.float32).reshape(40, 100),
    "bf16": np.arange(3000).astype(jnp.bfloat16).reshape(3, 1000),
    "prime": np.arange(10007 * 3, dtype=np.int32).reshape(10007, 3),
    "long": np.arange(3 * 5000, dtype=np.float64).reshape(3, 5000),
    "../../outside": np.arange(600, dtype=np.float32),
}
ARRAYS = {name: np.asarray(values) for name, values in ARRAYS.items()}


def same(found, arrays):
    assert found.keys() == arrays.keys()
    for name, values in arrays.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), values)


@pytest.mark.parametrize("largest", [2**25, 20_000])
def test_every_array_comes_from_the_files(tmp_path, monkeypatch, without_tensorstore, largest):
    monkeypatch.setattr(array_writer, "MAX_CHUNK_BYTES", largest)
    base, manifest = save(tmp_path, ARRAYS)
    same(ArrayReader(base, manifest, result_of).read(dict.fromkeys(ARRAYS)), ARRAYS)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    narrow = {name: values for name, values in ARRAYS.items() if values.dtype != np.float64}
    same(ArrayReader(base, manifest, result_of).read(dict.fromkeys(narrow, here)), narrow)


def test_boxes_of_chunks(tmp_path, monkeypatch, without_tensorstore):
    """Boxes begin and end within chunks, along any axis."""
    monkeypatch.setattr(array_writer, "MAX_CHUNK_BYTES", 400)
    array = np.arange(23 * 17 * 5, dtype=np.int32).reshape(23, 17, 5)
    base, manifest = save(tmp_path, {"x": array})
    draw = random.Random(0)
    for _ in range(40):
        ends = [sorted(draw.sample(range(size + 1), 2)) for size in array.shape]
        box = tuple(map(tuple, ends))
        found = ArrayReader(base, manifest, result_of).read_boxes({"x": [box]})["x"][box]
        np.testing.assert_array_equal(found, array[tuple(slice(*end) for end in ends)])


def test_bools_are_left_to_tensorstore(tmp_path):
    arrays = {"mask": np.arange(3000) % 3 == 0, "x": np.arange(3000.0)}
    base, manifest = save(tmp_path, arrays)
    same(ArrayReader(base, manifest, result_of).read(dict.fromkeys(arrays)), arrays)


def test_trees_of_several_nodes(tmp_path, monkeypatch, without_tensorstore):
    """Keys of a node lack what those below its parent have in common."""
    config = {**CONFIG, "max_decoded_node_bytes": 500}
    monkeypatch.setattr(array_writer, "CONFIG", config)
    arrays = {f"params/layer{i:04d}/kernel": np.full(300, i, np.float32) for i in range(200)}
    base, _ = save(tmp_path, arrays)
    manifest = manifest_of(arrays)
    store = ts.KvStore.open(base).result()
    assert ts.ocdbt.dump(store).result()["versions"][-1]["root_height"] >= 2
    same(ArrayReader(base, manifest, result_of).read(dict.fromkeys(arrays)), arrays)


def save_of_processes(tmp_path, count=3):
    """Return the base and manifest of a database that several processes wrote, and its array."""
    base = directory_spec(str(tmp_path))
    array = np.arange(count * 200, dtype=np.float32)
    for process in range(count):
        index = (slice(process * 200, process * 200 + 200),)
        parts = [OwnParts("x", array.shape, array.dtype, (200,), [(index, array[index])])]
        own = {**base, "path": f"{base['path']}ocdbt.process_{process}/"}
        write(own, parts, result_of, first=process == 0)
    merge(base, [f"ocdbt.process_{process}/" for process in range(count)], 10, result_of)
    return base, manifest_of({"x": array}, {"x": (200,)}, count), array


def test_databases_of_several_processes(tmp_path, without_tensorstore):
    base, manifest, array = save_of_processes(tmp_path)
    same(ArrayReader(base, manifest, result_of).read({"x": None}), {"x": array})


@pytest.mark.parametrize(
    "odd", ["without google_crc32c", "slow google_crc32c", "an index that is not known"]
)
def test_what_is_odd_is_left_to_tensorstore(tmp_path, monkeypatch, odd):
    base, manifest = save(tmp_path, ARRAYS)
    if odd == "without google_crc32c":
        monkeypatch.setitem(sys.modules, "google_crc32c", None)
    elif odd == "slow google_crc32c":
        monkeypatch.setattr("google_crc32c.implementation", "python")
    else:
        monkeypatch.setattr(ArrayReader, "_places", lambda self, wanted: {})
    same(ArrayReader(base, manifest, result_of).read(dict.fromkeys(ARRAYS)), ARRAYS)


def test_a_place_that_holds_other_bytes_is_read_by_tensorstore(tmp_path, monkeypatch):
    base, manifest = save(tmp_path, ARRAYS)
    find = ArrayReader._places

    def moved(self, wanted):
        places = find(self, wanted)
        return {
            key: place if isinstance(place, bytes) else place._replace(start=place.start + 1)
            for key, place in places.items()
        }

    monkeypatch.setattr(ArrayReader, "_places", moved)
    same(ArrayReader(base, manifest, result_of).read(dict.fromkeys(ARRAYS)), ARRAYS)


def test_files_are_closed(tmp_path):
    base, manifest = save(tmp_path, ARRAYS)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ArrayReader(base, manifest, result_of).read(dict.fromkeys(ARRAYS))
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 2  # tensorstore keeps some


def flips(directory, number):
    """Yield while one bit of a file is flipped."""
    draw = random.Random(1)
    files = [os.path.join(above, name) for above, _, names in os.walk(directory) for name in names]
    for _ in range(number):
        file = draw.choice(files)
        at = draw.randrange(os.path.getsize(file))
        with open(file, "r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte[0] ^ (1 << draw.randrange(8))]))
            opened.flush()
            yield file
            opened.seek(at)
            opened.write(byte)


@pytest.mark.parametrize("number", [60, pytest.param(400, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("processes", [1, 3])
def test_a_flipped_bit_never_changes_what_is_read(tmp_path, number, processes):
    """What is read is what was written, or an error; a chunk of the arrays is always an error."""
    if processes == 1:
        arrays = {name: values for name, values in ARRAYS.items() if values.size > 5}
        base, manifest = save(tmp_path, arrays)
    else:
        base, manifest, array = save_of_processes(tmp_path, processes)
        arrays = {"x": array}
    refused = 0
    for _ in flips(tmp_path, number):
        try:
            found = ArrayReader(base, manifest, result_of).read(dict.fromkeys(arrays))
        except CorruptedCheckpointError:
            refused += 1
        else:
            same(found, arrays)
    assert refused > number / 10


def test_a_truncated_or_missing_file(tmp_path):
    _, manifest = save(tmp_path / "a", ARRAYS)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (data,) = [file for file in (tmp_path / "b" / "d").iterdir() if file.stat().st_size > 100_000]
    os.truncate(data, 50_000)
    with pytest.raises(CorruptedCheckpointError):
        ArrayReader(directory_spec(str(tmp_path / "b")), manifest, result_of).read(
            dict.fromkeys(ARRAYS)
        )


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path):
    base, manifest = save(tmp_path / "a", ARRAYS)
    places = ArrayReader(base, manifest, result_of)._places(ARRAYS)
    (data,) = (tmp_path / "a" / "d").iterdir()
    for is_link in (False, True):
        with ChunkFiles(base["path"], places) as files:
            values = np.empty(600, np.float32)
            future = files.begin(array_path("../../outside"), (600,), (600,), ((0, 600),), values)
            assert future.result() is not is_link
        if not is_link:
            data.rename(tmp_path / "elsewhere")
            data.symlink_to(tmp_path / "elsewhere")
