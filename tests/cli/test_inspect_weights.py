"""`python -m jstep inspect` of safetensors files: the headers, and one line for a bad file."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.cli.main import main

PARAMS = {"layers": [{"w": np.ones((4, 3), np.float32), "b": jnp.ones(4, jnp.bfloat16)}], "n": np.int8(2)}


@pytest.fixture
def path(tmp_path):
    return jstep.save_weights(tmp_path / "model.safetensors", PARAMS, metadata={"format": "pt", "epoch": "3"})


def test_a_file(path, tmp_path, capsys):
    for where in (path, str(tmp_path)):
        assert main(["inspect", where]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[0] == path
        assert "3 tensors, 17 parameters, 57 B, in 1 file\n" in out
        assert '"epoch": "3"' in out
        (line,) = (line for line in out.splitlines() if line.startswith("layers/0/b"))
        assert line.split() == ["layers/0/b", "bfloat16", "BF16", "[4]", "8"]


def test_an_index(tmp_path, capsys):
    path = jstep.save_weights(tmp_path / "model.safetensors", PARAMS, max_shard_bytes=56)
    for where in (path, str(tmp_path), str(tmp_path / "model.safetensors")):
        assert main(["inspect", where, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["path"] == path
        assert (found["bytes"], found["parameters"], found["metadata"]) == (57, 17, {"format": "pt"})
        assert [one["tensors"] for one in found["files"]] == [2, 1]
        assert found["tensors"][1]["name"] == "layers/0/w"
        assert found["tensors"][1]["shape"] == [4, 3]
        assert found["tensors"][1]["dtype"] == "float32"
        assert found["tensors"][1]["file"].startswith("model-0000")
    assert main(["inspect", str(tmp_path)]) == 0
    assert "model-00002-of-00002.safetensors" in capsys.readouterr().out


def test_a_folder_whose_name_could_be_that_of_a_checkpoint(tmp_path, capsys):
    (tmp_path / "gpt-2").mkdir()
    jstep.save_weights(tmp_path / "gpt-2" / "model.safetensors", PARAMS)
    assert main(["inspect", str(tmp_path / "gpt-2")]) == 0
    assert "3 tensors" in capsys.readouterr().out


def test_a_run_with_an_export_in_it_shows_its_checkpoints(path, tmp_path, capsys):
    with jstep.Saver(tmp_path) as saver:
        saver.save(jstep.TrainState.create({"w": 1.0}, jstep.sgd(0.1)))
    assert main(["inspect", str(tmp_path)]) == 0
    assert "model-0" in capsys.readouterr().out
    assert main(["inspect", path]) == 0
    assert "3 tensors" in capsys.readouterr().out


def test_bad_files_are_a_line(tmp_path, path, capsys):
    whole = (tmp_path / "model.safetensors").read_bytes()
    bad = tmp_path / "bad"
    for content in (b"", whole[:-1], whole + b"x", struct.pack("<Q", 2**63), b"\xff" * 100, b"{}", b"hello, world"):
        bad.write_bytes(content)
        assert main(["inspect", str(bad)]) == 2
        out, err = capsys.readouterr()
        assert not out
        (line,) = err.splitlines()
        assert line.startswith("jstep inspect: ")
        assert str(bad) in line
    (tmp_path / "empty").mkdir()
    for where in (tmp_path / "nowhere", tmp_path / "empty"):
        assert main(["inspect", str(where)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["inspect", path, "--verify"]) == 2
    assert "no checksums" in capsys.readouterr().err


def test_names_do_not_speak_to_the_terminal(tmp_path, capsys):
    path = jstep.save_weights(tmp_path / "x", {"w": np.ones(2)}, {"w": "a\x1b[31mb\nc"}, {"k\x1b": "v\n"})
    assert main(["inspect", path]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 6
