"""The database of the arrays of a checkpoint: parts, chunks, and what is not read from it."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from checkpoint_scripts import end, start

import jstep
from jstep.array_store import array_writer
from jstep.array_store.array_reader import ArrayReader
from jstep.array_store.listing import directory_spec
from jstep.array_store.manifest import CorruptedCheckpointError, Leaf, Manifest
from jstep.checkpoint.saver import Saver


def result_of(future, nbytes):
    return future.result()


def test_an_array_without_one_of_its_chunks_is_not_read_as_zeros(tmp_path):
    base = directory_spec(str(tmp_path))
    metadata = array_writer.array_metadata((4,), np.dtype(np.float32), [2])
    kvstore = {"driver": "ocdbt", "base": base, "config": array_writer.CONFIG, "path": "params/w/"}
    spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
    array = ts.open(spec, create=True).result()
    array[:2].write(np.ones(2, np.float32)).result()
    leaf = Leaf("params/w", ("params", "w"), (4,), "float32", 16, "params/w")
    manifest = Manifest(1, 0.0, (leaf,), parts={"params/w": (2,)})
    with pytest.raises(CorruptedCheckpointError, match="the array of 'params/w' is missing"):
        ArrayReader(base, manifest, result_of).read({"params/w": None})
    assert "is missing" in ArrayReader(base, manifest, result_of).find_corruption()[0]
    array[2:].write(np.ones(2, np.float32)).result()
    found = ArrayReader(base, manifest, result_of).read({"params/w": None})
    assert found["params/w"].tolist() == [1.0] * 4


def test_zeros_are_stored(tmp_path):
    """Chunks of zeros that were not stored could not be told from lost ones."""
    base, zeros = directory_spec(str(tmp_path)), np.zeros((512, 8), np.float32)
    array_writer.write(
        base, array_writer.take({"w": zeros, "b": np.int32(0)[None]}), result_of, first=True
    )
    assert sum(file.stat().st_size for file in tmp_path.glob("d/*")) > zeros.nbytes


@pytest.mark.parametrize(
    ("part", "shape", "expected"),
    [
        ((), (), []),
        ((10, 10), (10, 10), [10, 10]),
        ((50_021, 4), (50_021, 4), [8337, 4]),  # a prime number of rows: the last chunk is smaller
        ((50_021, 4), (100_042, 4), [1, 4]),  # two parts: no chunk may belong to both
        ((24, 10_000), (48, 10_000), [3, 10_000]),
        ((3, 50_000), (3, 50_000), [1, 25_000]),
    ],
)
def test_chunks_of_a_part(monkeypatch, part, shape, expected):
    monkeypatch.setattr(array_writer, "MAX_CHUNK_BYTES", 140_000)
    chunk = array_writer.chunk_shape(part, shape, 4)
    assert chunk == expected
    assert math.prod(chunk) * 4 <= 140_000


@pytest.mark.parametrize("part", [*itertools.product([1, 2, 7, 12], [1, 5, 16])])
def test_no_chunk_belongs_to_two_parts(monkeypatch, part):
    monkeypatch.setattr(array_writer, "MAX_CHUNK_BYTES", 40)
    chunk = array_writer.chunk_shape(part, tuple(2 * size for size in part), 4)
    assert all(size % step == 0 for size, step in zip(part, chunk, strict=True))


def test_orbax_opens_a_checkpoint(tmp_path):
    """It reads it in each of its ways, with and without a target."""
    params = {
        "w": jnp.arange(12.0).reshape(3, 4),
        "h": jnp.ones((2, 2), jnp.bfloat16),
        "flag": jnp.array(True),
    }
    with Saver(tmp_path) as saver:
        path = saver.save(
            jstep.TrainState.create(params, jstep.gradient_descent(0.1), global_step=7)
        )
    expected = {
        "params/w": params["w"],
        "params/h": params["h"],
        "params/flag": params["flag"],
        "global_step": 7,
    }
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    kinds = {name: (np.shape(leaf), jnp.asarray(leaf).dtype) for name, leaf in expected.items()}
    target = {name: jax.ShapeDtypeStruct(*kind, sharding=here) for name, kind in kinds.items()}
    with ocp.PyTreeCheckpointer() as trees, ocp.StandardCheckpointer() as standard:
        found = [trees.restore(path), standard.restore(path), standard.restore(path, target)]
    for restored in (*found, ocp.v1.load(path), ocp.v1.load(path, target)):
        assert restored.keys() == expected.keys()
        for name, leaf in restored.items():
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected[name]), name)


def test_saves_and_restores_import_nothing_of_orbax(tmp_path):
    script = """
        with Saver(directory) as saver:
            saver.save(state_at(1, 2.0))
            assert saver.restore()["global_step"] == 1
        print("orbax" in sys.modules)
        """
    assert end(start(script, tmp_path))[0] == "False"
