"""Checksums that are right and contents that are not: an error, never numbers, nor a crash of another kind."""

import json
import zlib

import pytest
from object_states import state_at

import jstep
from jstep.checkpoint.format import manifest


def forge(store, change):
    """Changes the index of model-1 and seals it and the manifest again."""
    (key,) = [key for key in store.keys("run/model-1/") if "part.0" in key]
    index = json.loads(store.data(key))
    change(index)
    data = json.dumps(index).encode()
    store.put("bkt", key, data)
    at = "run/model-1/manifest.json"
    found = manifest.decode(store.data(at))
    name = key.removeprefix("run/model-1/")
    files = dict(found.files) | {name: {"bytes": len(data), "crc32": [f"{zlib.crc32(data):08x}"]}}
    store.put("bkt", at, manifest.encode(manifest.dataclasses.replace(found, files=files)))


CHANGES = {
    "no blocks": lambda index: index.pop("blocks"),
    "none of them": lambda index: index["blocks"].clear(),
    "one missing": lambda index: index["blocks"].pop(),
    "another dtype": lambda index: index["blocks"][0].__setitem__(1, "int8"),
    "no dtype": lambda index: index["blocks"][0].__setitem__(1, "nonsense"),
    "beyond the array": lambda index: index["blocks"][0].__setitem__(2, [10**9, 0]),
    "another shape": lambda index: index["blocks"][0].__setitem__(3, [10**6, 10**6]),
    "too few axes": lambda index: index["blocks"][0].__setitem__(3, []),
    "another object": lambda index: index["blocks"][0].__setitem__(4, "../../other/pack.0.0"),
    "beyond the object": lambda index: index["blocks"][0].__setitem__(5, 10**9),
    "negative": lambda index: index["blocks"][0].__setitem__(5, -1),
    "said to be compressed": lambda index: index["blocks"][0].__setitem__(8, 1),
    "no list": lambda index: index["blocks"].__setitem__(0, 7),
    "texts": lambda index: index["blocks"][0].__setitem__(6, "many"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_index_that_lies(gcs, what):
    gcs.page = 1000
    with jstep.Saver("gs://bkt/run") as saver:
        saver.save(state_at(1))
    forge(gcs, CHANGES[what])
    reader = jstep.Saver("gs://bkt/run")
    for target in (state_at(0), None):
        with pytest.raises(jstep.CheckpointError, match="model-1"):
            reader.restore(target)
    assert reader._store.damage("gs://bkt/run/model-1", reader._store.manifest("gs://bkt/run/model-1")) or what in (
        *("none of them", "one missing", "another dtype", "beyond the array"),
    )
