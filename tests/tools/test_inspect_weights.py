"""`python -m jstep inspect` shows safetensors files and checkpoints of Orbax; errors for bad files are one line."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jstep

PARAMS = {"layers": [{"w": np.ones((4, 3), np.float32), "b": jnp.ones(4, jnp.bfloat16)}], "n": np.int8(2)}


@pytest.fixture
def path(tmp_path):
    return jstep.save_weights(tmp_path / "model.safetensors", PARAMS, metadata={"format": "pt", "epoch": "3"})


def test_a_file(path, tmp_path, cli):
    for location in (path, str(tmp_path)):
        out = cli("inspect", location).out
        assert out.splitlines()[0] == path
        assert "3 tensors, 17 parameters, 57 B, in 1 file\n" in out
        assert '"epoch": "3"' in out
        (line,) = (line for line in out.splitlines() if line.startswith("layers/0/b"))
        assert line.split() == ["layers/0/b", "bfloat16", "BF16", "[4]", "8"]


def test_an_index(tmp_path, cli):
    path = jstep.save_weights(tmp_path / "model.safetensors", PARAMS, max_shard_bytes=56)
    for location in (path, str(tmp_path), str(tmp_path / "model.safetensors")):
        result = json.loads(cli("inspect", location, "--json").out)
        assert result["path"] == path
        assert (result["bytes"], result["parameters"], result["metadata"]) == (57, 17, {"format": "pt"})
        assert [one["tensors"] for one in result["files"]] == [2, 1]
        assert result["tensors"][1]["name"] == "layers/0/w"
        assert result["tensors"][1]["shape"] == [4, 3]
        assert result["tensors"][1]["dtype"] == "float32"
        assert result["tensors"][1]["file"].startswith("model-0000")
    assert "model-00002-of-00002.safetensors" in cli("inspect", tmp_path).out


def test_a_folder_of_weights_named_like_a_checkpoint(tmp_path, cli):
    (tmp_path / "gpt-2").mkdir()
    jstep.save_weights(tmp_path / "gpt-2" / "model.safetensors", PARAMS)
    assert "3 tensors" in cli("inspect", str(tmp_path / "gpt-2")).out


def test_a_run_with_exported_weights_shows_checkpoints(path, tmp_path, cli):
    with jstep.Saver(tmp_path) as saver:
        saver.save(jstep.TrainState.create({"w": 1.0}, jstep.sgd(0.1)))
    assert "model-0" in cli("inspect", tmp_path).out
    assert "3 tensors" in cli("inspect", path).out


def test_errors_for_bad_files_are_one_line(tmp_path, path, cli):
    complete = (tmp_path / "model.safetensors").read_bytes()
    bad = tmp_path / "bad"
    for content in (
        b"",
        complete[:-1],
        complete + b"x",
        struct.pack("<Q", 2**63),
        b"\xff" * 100,
        b"{}",
        b"hello, world",
    ):
        bad.write_bytes(content)
        out, err = cli("inspect", bad, code=2)
        assert not out
        (line,) = err.splitlines()
        assert line.startswith("jstep inspect: ")
        assert str(bad) in line
    (tmp_path / "empty").mkdir()
    for location in (tmp_path / "nowhere", tmp_path / "empty"):
        assert len(cli("inspect", location, code=2).err.splitlines()) == 1
    assert "no checksums" in cli("inspect", path, "--verify", code=2).err


def test_names_of_tensors_are_escaped_for_the_terminal(tmp_path, cli):
    path = jstep.save_weights(tmp_path / "x", {"w": np.ones(2)}, {"w": "a\x1b[31mb\nc"}, {"k\x1b": "v\n"})
    out = cli("inspect", path).out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 6


def test_checkpoints_of_orbax(tmp_path, cli):
    arrays = {"params": {"layers": [jnp.ones((4, 3)), jnp.ones(4, jnp.bfloat16)]}, "step": 3, "note": "x"}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, args=ocp.args.PyTreeSave(arrays))
        manager.wait_until_finished()
    path = str(tmp_path / "run" / "7" / "default")
    for location in (path, str(tmp_path / "run" / "7")):
        result = json.loads(cli("inspect", location, "--json").out)
        assert (result["path"], result["format"], result["parameters"]) == (path, "orbax", 17)
        assert [one["name"] for one in result["tensors"]] == ["params/layers/0", "params/layers/1", "step"]
        assert result["tensors"][1] == {"name": "params/layers/1", "dtype": "bfloat16", "shape": [4], "bytes": 8}
    out = cli("inspect", path).out
    assert "3 tensors, 17 parameters" in out
    (line,) = (line for line in out.splitlines() if line.startswith("params/layers/0"))
    assert line.split() == ["params/layers/0", "float32", "[4,3]", "48"]
    for location, message in (
        ([str(tmp_path / "run")], "is a directory of checkpoints (7)"),
        ([path, "--verify"], "no checksums"),
    ):
        assert message in cli("inspect", *location, code=2).err


def test_a_checkpoint_of_orbax_named_like_one_of_jstep(tmp_path, cli):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "gpt-2", {"w": jnp.ones(3)})
    assert "1 tensor, 3 parameters" in cli("inspect", str(tmp_path / "gpt-2")).out
