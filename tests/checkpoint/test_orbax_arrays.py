"""The database of the arrays of a checkpoint."""

import types

import numpy as np
import pytest
import tensorstore as ts

from jstep.checkpoint import orbax_arrays


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
        orbax_arrays.read_arrays(
            orbax_arrays.in_folder(str(tmp_path)), manifest, {"params.w": None}, lambda future, nbytes: future.result()
        )
    array[2:].write(np.ones(2, np.float32)).result()
    found = orbax_arrays.read_arrays(
        orbax_arrays.in_folder(str(tmp_path)), manifest, {"params.w": None}, lambda future, nbytes: future.result()
    )
    assert found["params.w"].tolist() == [1.0] * 4
