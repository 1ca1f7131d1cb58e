"""The database of the arrays of a checkpoint."""

import types

import numpy as np
import pytest
import tensorstore as ts

from jstep.checkpoint import orbax_arrays
from jstep.checkpoint.listing import read_manifest
from jstep.checkpoint.saver import Saver


def test_the_entries_of_many_arrays_are_in_several_nodes(tmp_path):
    """A node is searched entry by entry, so that reading would be quadratic in the number of arrays."""
    config = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 10**8}
    part = {"driver": "ocdbt", "base": orbax_arrays.in_folder(f"{tmp_path}/ocdbt.process_0")}
    entries = {f"params/{n:05d}/.zarray": b"%5d" % n * 200 for n in range(2300)}
    transaction = ts.Transaction(atomic=True)
    opened = ts.KvStore.open({**part, "config": config}).result()
    for name, value in entries.items():
        opened.with_transaction(transaction)[name] = value
    transaction.commit_sync()

    orbax_arrays.merge_parts(str(tmp_path))
    folder = ts.KvStore.open(orbax_arrays.in_folder(str(tmp_path))).result()
    newest = ts.ocdbt.dump(folder).result()["versions"][-1]
    assert newest["root"]["statistics"]["num_keys"] == len(entries)
    assert newest["root_height"] == 1
    merged = ts.KvStore.open({"driver": "ocdbt", "base": orbax_arrays.in_folder(str(tmp_path))}).result()
    assert {name: merged[name] for name in [*entries][::100]} == dict([*entries.items()][::100])


def test_an_array_without_one_of_its_chunks_is_not_read_as_zeros(tmp_path):
    """The checksums find it before, unless they are not verified."""
    store = {"driver": "ocdbt", "base": orbax_arrays.in_folder(str(tmp_path)), "path": "params.w/"}
    metadata = {"shape": [4], "chunks": [2], "dtype": "<f4", "compressor": None}
    array = ts.open({"driver": "zarr", "kvstore": store, "metadata": metadata}, create=True).result()
    array[:2].write(np.ones(2, np.float32)).result()
    manifest = types.SimpleNamespace(leaves=())
    with pytest.raises(ValueError, match="missing"):
        orbax_arrays.read_arrays(orbax_arrays.in_folder(str(tmp_path)), manifest, {"params.w": None})
    array[2:].write(np.ones(2, np.float32)).result()
    found = orbax_arrays.read_arrays(orbax_arrays.in_folder(str(tmp_path)), manifest, {"params.w": None})
    assert found["params.w"].tolist() == [1.0] * 4


def test_an_array_without_one_of_its_keys_is_missing(tmp_path):
    with Saver(tmp_path) as saver:
        path = saver.save({"global_step": 1, "w": np.zeros((2, 3)), "x": np.ones(())})
        saver.wait()
    manifest = read_manifest(path)
    stored = ts.KvStore.open({"driver": "ocdbt", "base": orbax_arrays.in_folder(path)}).result()
    keys = [key.decode() for key in stored.list().result()]
    assert sorted(keys) == ["global_step/.zarray", "global_step/0", "w/.zarray", "w/0.0", "x/.zarray", "x/0"]
    assert orbax_arrays.missing(path, manifest) is None
    for key in keys:
        value = stored[key]
        del stored[key]
        assert orbax_arrays.missing(path, manifest) == key.partition("/")[0]
        stored[key] = value
    assert orbax_arrays.missing(path, manifest) is None
