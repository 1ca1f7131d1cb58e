"""The index of the arrays of a checkpoint: ours is read as tensorstore reads it, and a stranger's
before it does."""

import databases
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from checkpoint_states import NO_SLOTS, edit_manifest
from foreign_databases import read_index_of

import jstep
from jstep.array_store.manifest import CheckpointError
from jstep.look.cli import main


@pytest.fixture
def saved(tmp_path):
    params = {"w": jnp.arange(1000.0), "b": jnp.arange(3.0)}
    with jstep.Saver(tmp_path) as saver:
        path = saver.save(jstep.TrainState.create(params, NO_SLOTS, global_step=1))
    edit_manifest(path, lambda data: data.update(files={}))
    return path


def restored(path):
    with jstep.Saver(path.rpartition("/")[0]) as saver:
        return saver.restore(None)


def test_it_has_the_keys_and_places_that_tensorstore_finds(saved):
    index = read_index_of(saved)
    store = ts.KvStore.open({"driver": "file", "path": f"{saved}/"}).result()
    root = ts.ocdbt.dump(store).result()["versions"][-1]["root"]["location"]
    entries = ts.ocdbt.dump(store, root).result()["entries"]
    assert list(index.values) == [entry["key"].decode() for entry in entries]
    for entry, value in zip(entries, index.values.values(), strict=True):
        if "inline_value" in entry:
            assert value == entry["inline_value"]
        else:
            assert entry["indirect_value"] == f"value::{value.path}:{value.start}:{value.length}"
    assert index.chunk_bytes() == {"global_step": 8, "params/b": 16, "params/w": 4004}


# Indices with right checksums.

KEY = b"$files/x/zarr.json"


def node_named_twice(put):
    child = put(databases.leaf({b"x": b"1"}))
    for height in range(1, 31):
        keys = [bytes([97 + i]) for i in range(2)]
        child = put(databases.interior(height, [(key, 1, *child) for key in keys]))
    return 30, *child


def bytes_named_twice(put):
    put(bytes(100))
    return 0, *put(databases.leaf({b"params/b/c/0": (0, 16), b"params/w/c/0": (8, 16)}))


def a_node_within_another(put):
    inner = databases.leaf({b"": b"1"})
    start, length = put(databases.leaf({b"a": inner}))
    return 1, *put(
        databases.interior(1, [(b"a", 1, start, length), (b"b", 1, start + 1, length - 1)])
    )


def keys_that_share_a_long_beginning(put):
    begin = b"$files/" + b"a" * 5000
    return 0, *put(databases.leaf({begin + i.to_bytes(2, "big"): b"" for i in range(2000)}))


def another_file(put):
    return 0, *put(databases.leaf({KEY: (0, 10)}, "../model-2/d/" + "0" * 32))


def a_file_that_is_none_of_a_database(put):
    return 0, *put(databases.leaf({KEY: (0, 10)}, "d/sparse"))


def another_height(put):
    return 3, *put(databases.leaf({KEY: b""}))


def more_keys_than_bytes(put):
    node = bytearray(databases.leaf({KEY: b""}))
    at = node.index(databases.keys_part([KEY]))
    node[at : at + 1] = databases.number(2**40)
    return 0, *put(databases.sealed(0x0CDB20DE, bytes(node[12:-4])))


def a_node_without_keys(put):
    return 0, *put(databases.sealed(0x0CDB20DE, bytes(3)))  # of height 0, with 0 files and 0 keys


def bytes_beyond_any_file(put):
    return 0, *put(databases.leaf({KEY: (2**63 + 5, 10)}))


def a_node_beyond_any_file(put):
    child = put(databases.leaf({KEY: b""}))
    return 1, *put(databases.interior(1, [(KEY[:1], 1, 2**63 + 5, child[1])]))


STRANGE = [
    bytes_beyond_any_file,
    a_node_beyond_any_file,
    node_named_twice,
    bytes_named_twice,
    a_node_within_another,
    keys_that_share_a_long_beginning,
    another_file,
    a_file_that_is_none_of_a_database,
    another_height,
    more_keys_than_bytes,
    a_node_without_keys,
]


@pytest.mark.parametrize("make", STRANGE, ids=lambda make: make.__name__)
def test_a_strange_index_is_an_error_before_tensorstore_reads_it(saved, make, capsys, monkeypatch):
    databases.put(saved, make)
    monkeypatch.setattr(ts, "open", lambda *_, **__: pytest.fail("an array was opened"))
    for options in ([], ["--verify"]):
        assert main(["inspect", saved, *options]) == 2
        error = capsys.readouterr().err
        assert saved in error
        assert "its files" in error or "the index of its arrays is not what jstep writes" in error
    with pytest.raises(
        CheckpointError,
        match=r"model-1 is corrupted: (its files|the index of its arrays is not what)",
    ):
        restored(saved)


def test_a_file_without_a_name_is_none(saved, capsys):
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{saved}/"}}
    from jstep.array_store.array_writer import CONFIG

    ts.KvStore.open(store | {"config": CONFIG}).result().write(b"$files/zarr.json", b"{}").result()
    assert main(["inspect", saved, "--verify"]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_an_array_belongs_to_one_leaf_and_is_stored_as_its_dtype(saved):
    original = np.asarray(restored(saved)["params"]["w"])

    def twice(data):
        data["leaves"][0] |= {"array": data["leaves"][1]["path"]}

    edit_manifest(saved, twice)
    with pytest.raises(CheckpointError, match="is the array of 2 leaves"):
        restored(saved)
    edit_manifest(saved, lambda data: data["leaves"][0].pop("array") and None)
    assert np.array_equal(restored(saved)["params"]["w"], original)
    edit_manifest(
        saved, lambda data: data["leaves"][1].update(dtype="float64", stored_as="float32")
    )
    with pytest.raises(CheckpointError, match="of dtype float64 is not stored as float32"):
        restored(saved)
