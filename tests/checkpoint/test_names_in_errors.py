"""Names of somebody else in the texts of errors: no control character reaches the terminal by a
traceback."""

import json
import os
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_states import edit_manifest, save_all, state_at
from foreign_texts import CONTROL, assert_printable, printed

import jstep
from jstep.checkpoint.names import latest_checkpoint
from jstep.core.secret_text import describe_error
from jstep.hooks.hook_states import set_states
from jstep.stores.event_files import frame
from jstep.stores.objects import translate_error
from jstep.stores.tagged_json import decode

NAME = f"a{CONTROL}b"
SHAPES = {"w": jax.ShapeDtypeStruct((3,), np.float32)}


@pytest.fixture
def saved(tmp_path):
    with jstep.Saver(tmp_path) as saver:
        save_all(saver, [1, 2])
    return tmp_path


def in_data(run):
    """The directory of a checkpoint's arrays, which the manifest names, is missing."""
    edit_manifest(run / "model-2", lambda data: data.update(data=f"data.{NAME}"))


def in_fifo(run):
    os.mkfifo(run / "model-2" / "d" / NAME)


def in_key(run):
    edit_manifest(run / "model-2", lambda data: data.update({NAME: 1}))


def in_path(run):
    def rename(data):
        for leaf in data["leaves"]:
            if leaf["path"] == "params/w":
                leaf["path"] = f"params/{NAME}"

    edit_manifest(run / "model-2", rename)


def in_prefix(run):
    for step in (1, 2):
        os.rename(run / f"model-{step}", run / f"{NAME}-{step}")


@pytest.mark.parametrize("put", [in_data, in_fifo, in_key, in_path, in_prefix])
def test_a_checkpoint(put, saved):
    put(saved)
    with (
        pytest.raises((jstep.CheckpointError, ValueError, FileNotFoundError)) as raised,
        jstep.Saver(saved) as saver,
    ):
        saver.restore(state_at(0))
    assert_printable(printed(raised.value))


def test_a_manifest_that_is_too_large(saved, monkeypatch):
    in_prefix(saved)
    monkeypatch.setattr("jstep.array_store.listing.MAX_MANIFEST_BYTES", 10)
    with pytest.raises(jstep.CheckpointError, match="has more than 10 bytes") as raised:
        jstep.load_weights(latest_checkpoint(str(saved), None), {"params": SHAPES})
    assert_printable(printed(raised.value))


def test_a_parent_with_another_prefix(saved, tmp_path):
    in_prefix(saved)
    step = jstep.minimize(
        lambda params, x: jnp.sum((params["w"] - x) ** 2), jstep.gradient_descent(0.1)
    )
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, jstep.gradient_descent(0.1))
    with pytest.raises(FileNotFoundError, match="the newest checkpoint there is") as raised:
        jstep.train(
            step,
            state,
            [jnp.ones(3)],
            1,
            start_from=saved,
            checkpoint_dir=tmp_path / "branch",
            progress=False,
        )
    assert_printable(printed(raised.value))


def header(**tensors):
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(12)


FLOATS = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
SHARDS = "model.safetensors.index.json"
WEIGHTS = {
    "the name of a tensor": {"model.safetensors": header(**{NAME: FLOATS})},
    "the dtype of a tensor": {"model.safetensors": header(w=FLOATS | {"dtype": NAME})},
    "files": {f"{NAME}.safetensors": header(w=FLOATS), "other.safetensors": header(w=FLOATS)},
    "a file that is corrupted": {f"{NAME}.safetensors": b"x" * 20},
    "a file with other tensors": {f"{NAME}.safetensors": header(v=FLOATS)},
    "an index that is not JSON": {f"{NAME}.{SHARDS}": b"{"},
    "an index without files": {f"{NAME}.{SHARDS}": b"[]"},
    "a file that an index names": {SHARDS: json.dumps({"weight_map": {"w": NAME}}).encode()},
    "a file elsewhere": {SHARDS: json.dumps({"weight_map": {"w": f"../{NAME}"}}).encode()},
    "a tensor that is in two files": {
        SHARDS: json.dumps({"weight_map": {"w": NAME, "v": "two"}}).encode(),
        NAME: header(w=FLOATS),
        "two": header(w=FLOATS),
    },
    "a tensor that is not there": {
        SHARDS: json.dumps({"weight_map": {NAME: "one"}}).encode(),
        "one": header(w=FLOATS),
    },
}


@pytest.mark.parametrize("files", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_weights(files, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        jstep.load_weights(tmp_path, SHAPES)
    assert_printable(printed(raised.value))


def test_weights_that_were_truncated_meanwhile(tmp_path):
    path = tmp_path / f"{NAME}.safetensors"
    path.write_bytes(header(w=FLOATS))

    def truncate(array):
        os.truncate(path, 20)
        return array

    target = {"v": SHAPES["w"], "w": SHAPES["w"]}
    with pytest.raises(ValueError, match="was truncated") as raised:
        jstep.load_weights(tmp_path, target, {"v": ("w", truncate), "w": "w"})
    assert_printable(printed(raised.value))


def test_items_of_orbax(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", {NAME: jnp.ones(3)})
    with pytest.raises(ValueError, match="does not fit") as raised:
        jstep.load_weights(tmp_path / "one", SHAPES)
    assert_printable(printed(raised.value))
    shutil.copytree(tmp_path / "one", tmp_path / NAME)
    with pytest.raises(ValueError, match="several items") as raised:
        jstep.load_weights(tmp_path, SHAPES)
    assert_printable(printed(raised.value))


def test_an_error_of_orbax_and_its_causes(tmp_path, monkeypatch):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / NAME, {"w": jnp.ones(3)})

    def fail(*_):
        raise ValueError(f"outer {NAME}") from OSError(f"inner {NAME}")

    for function in ("_restore_by_handler", "_metadata_by_handler"):
        monkeypatch.setattr(f"jstep.weights.load.{function}", fail)
        with pytest.raises(ValueError, match="not readable by Orbax") as raised:
            jstep.load_weights(tmp_path, SHAPES)
        assert_printable(printed(raised.value))


def test_event_files(tmp_path):
    path = tmp_path / f"events.out.tfevents.1.{NAME}"
    path.write_bytes(frame(b"")[:-1] + b"x")
    with pytest.raises(Exception, match="corrupted record") as raised:
        list(jstep.summary.summary_iterator(str(path)))
    assert_printable(printed(raised.value))
    assert raised.value.path == str(path)


def state_of_hook(**fields):
    hook = jstep.EarlyStopping("loss")
    record = {
        "key": "EarlyStopping(loss)",
        "class": "jstep.EarlyStopping",
        "state": hook.get_state(),
        "format": 1,
    }
    return hook, {"format": 1, "jstep": "1.0", "states": [record | fields]}


@pytest.mark.parametrize(
    "fields",
    [
        {"format": 9, "key": NAME},
        {"state": {"$bytes": NAME}},
        {"state": {NAME: 1}},
        {"state": {f"${NAME}": 1}},
    ],
)
def test_states_of_hooks(fields):
    hook, saved = state_of_hook(**fields)
    hook.key = fields.get("key")
    saved["states"][0]["class"] = None if hook.key else "jstep.EarlyStopping"
    saved["jstep"] = NAME
    with pytest.raises((jstep.CheckpointError, ValueError)) as raised:
        set_states([hook], saved)
    assert str(raised.value).isprintable()


def test_a_state_of_a_hook_that_is_gone(caplog):
    _, saved = state_of_hook(key=NAME)
    set_states([], saved)
    assert_printable(caplog.text)


def test_the_values_of_a_callback():
    hook = jstep.EarlyStopping("loss")
    hook.set_state(hook.get_state() | {"best": NAME, "bad": 10**6, "stopped_at": NAME})
    assert_printable(hook.stop_reason)


def test_names_of_from_loop():
    loop = jstep.from_loop(kept=types.SimpleNamespace())
    with pytest.raises(ValueError, match="the checkpoint has the states of") as raised:
        loop.set_state({NAME: 1, 2: 3})
    assert_printable(printed(raised.value))


def test_leaves_of_fingerprints(tmp_path):
    path = tmp_path / "fingerprints.jsonl"
    line = {"step": 2, "state": "0" * 16, "leaves": {NAME: "0" * 16}}
    path.write_text(json.dumps(line) + "\n")
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda params, x: jnp.sum((params["w"] - x) ** 2), optimizer)
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    hook = jstep.FingerprintHook(path=path, every_n_steps=2, per_leaf=True, on_divergence="raise")
    with pytest.raises(jstep.DivergenceError) as raised:
        jstep.train(step, state, [jnp.ones(3)] * 2, 2, hooks=[hook], progress=False)
    assert_printable(printed(raised.value))


def test_objects_of_a_bucket():
    for text in (
        "NOT_FOUND: x",
        f"DATA_LOSS: {NAME}",
        "OUT_OF_RANGE",
        f"INVALID: {CONTROL}",
        "CURL error no route",
    ):
        error = translate_error(ValueError(text), "read", f"gs://bucket/{NAME}")
        assert_printable(printed(error))


def test_files_of_the_system():
    assert_printable(describe_error(OSError(5, "Input/output error", NAME)))


def test_values_of_positions():
    with pytest.raises(ValueError) as raised:
        decode({"$bytes": {"$file": NAME}})
    assert str(raised.value).isprintable()
