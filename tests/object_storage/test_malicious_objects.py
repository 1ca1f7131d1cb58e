"""Malicious indices with valid checksums: restoring them raises CheckpointError and never returns numbers."""

import json
import zlib

import pytest
from object_states import state_at

import jstep
from jstep.checkpoint import manifest


def edit_index(store, change):
    (key,) = [key for key in store.keys("run/model-1/") if "part.0" in key]
    index = json.loads(store.data(key))
    change(index)
    data = json.dumps(index).encode()
    store.put("bkt", key, data)
    manifest_key = "run/model-1/manifest.json"
    decoded = manifest.decode(store.data(manifest_key))
    name = key.removeprefix("run/model-1/")
    files = dict(decoded.files) | {name: {"bytes": len(data), "crc32": [f"{zlib.crc32(data):08x}"]}}
    store.put("bkt", manifest_key, manifest.encode(manifest.dataclasses.replace(decoded, files=files)))


CHANGES = {
    "no blocks": lambda index: index.pop("blocks"),
    "one block missing": lambda index: index["blocks"].pop(),
    "another dtype": lambda index: index["blocks"][0].__setitem__(1, "int8"),
    "invalid dtype": lambda index: index["blocks"][0].__setitem__(1, "nonsense"),
    "beyond the array": lambda index: index["blocks"][0].__setitem__(2, [10**9, 0]),
    "too few axes": lambda index: index["blocks"][0].__setitem__(3, []),
    "another object": lambda index: index["blocks"][0].__setitem__(4, "../../other/pack.0.0"),
    "beyond the object": lambda index: index["blocks"][0].__setitem__(5, 10**9),
    "marked as compressed": lambda index: index["blocks"][0].__setitem__(8, 1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_invalid_index_is_an_error(gcs, what):
    gcs.page = 1000
    with jstep.Saver("gs://bkt/run") as saver:
        saver.save(state_at(1))
    edit_index(gcs, CHANGES[what])
    reader = jstep.Saver("gs://bkt/run")
    for target in (state_at(0), None):
        with pytest.raises(jstep.CheckpointError, match="model-1"):
            reader.restore(target)
    assert reader._store.find_corruption(
        "gs://bkt/run/model-1", reader._store.manifest("gs://bkt/run/model-1")
    ) or what in ("one block missing", "another dtype", "beyond the array")
