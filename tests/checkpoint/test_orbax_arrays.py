"""The database of the arrays of a checkpoint."""

import types

import numpy as np
import pytest
import tensorstore as ts

from jstep.checkpoint import orbax_arrays


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
