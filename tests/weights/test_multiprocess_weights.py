"""Weights of several processes: each reads its part, the first one writes, and errors are raised on all."""

import os

import numpy as np
import pytest
from processes import run, running_program
from safetensors_files import write_arrays

import jstep

SCRIPT = """
from jstep.weights import load
sizes = []
fill = load._fill
def counting(file, view, start, tensor):
    sizes.append(view.nbytes)
    fill(file, view, start, tensor)
load._fill = counting

for kind in jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    shapes = {
        name: jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, spec))
        for name, spec in {"rows": P("data"), "columns": P(None, "data"), "whole": P()}.items()
    }
    sizes.clear()
    params = jstep.load_weights(directory + "/in.safetensors", shapes)
    print("result", sum(sizes))
    assert all(leaf.sharding == shapes[name].sharding for name, leaf in params.items())
    params["host"] = np.arange(3)
    name = str(kind).split(".")[-1]
    folder = directory if process == 0 else directory + "/elsewhere"
    names = {"columns": ("t", np.transpose), "rows": "r"}
    jstep.save_weights(f"{folder}/{name}.safetensors", params, names, max_shard_bytes=200)
try:
    jstep.save_weights(f"{directory}/in.safetensors/no/folder", params)
except OSError:
    print("result own error")
except RuntimeError as error:
    print("result", error)
try:
    jstep.save_weights(f"{directory}/x", params, {"columns": ("t", lambda x: x[: int(x[1, 1])])})
except ValueError:
    print("result own error")
except RuntimeError as error:
    print("result", error)
"""


@pytest.mark.thorough
def test_two_processes_load_and_save(tmp_path):
    w = np.arange(32, dtype=np.float32).reshape(8, 4)
    write_arrays(tmp_path / "in.safetensors", rows=w, columns=w + 1, whole=w + 2)
    # XLA also prints lines, so those of the script have a prefix.
    outputs = [
        [line.removeprefix("result ") for line in lines if line.startswith("result ")]
        for lines in run(SCRIPT, 2, tmp_path)
    ]
    first, second = outputs
    assert first[:2] == second[:2] == ["256", "256"]  # half of two tensors and all of the third
    assert first[2:4] == ["own error", "own error"]
    assert all("process 0 could not save" in line for line in second[2:4])
    assert sorted(os.listdir(tmp_path))[:4] == [
        "Auto-00001-of-00003.safetensors",
        "Auto-00002-of-00003.safetensors",
        "Auto-00003-of-00003.safetensors",
        "Auto.safetensors.index.json",
    ]
    assert "elsewhere" not in os.listdir(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    for kind in ("Auto", "Explicit"):
        target = {"r": w, "t": w.T, "whole": w, "host": np.arange(3)}
        loaded = jstep.load_weights(tmp_path / f"{kind}.safetensors", target)
        for name, expected in {"r": w, "t": (w + 1).T, "whole": w + 2, "host": np.arange(3)}.items():
            np.testing.assert_array_equal(loaded[name], expected)


KILLED = """
import os, sys
import numpy as np, jstep
from jstep.weights import save
directory, at = sys.argv[1:]
new = {name: np.full((4, 4), 2, np.float32) for name in "abc"}
wait = lambda *args: (print("here", flush=True), sys.stdin.read())
if at == "written":
    save.confirm = wait
else:
    replace, left = os.replace, [int(at)]
    def counting(*args):
        replace(*args)
        left[0] -= 1
        left[0] or wait()
    os.replace = counting
jstep.save_weights(directory + "/model.safetensors", new, max_shard_bytes=64)
"""


@pytest.mark.thorough(except_for=["written", "8"])
@pytest.mark.parametrize("at", ["written", "1", "3", "4", "5", "7", "8"])
def test_sigkill_during_a_save(tmp_path, at):
    old = {name: np.full((4, 4), 1, np.float32) for name in "abc"}
    path = tmp_path / "model.safetensors"
    jstep.save_weights(path, old, max_shard_bytes=64)
    files = sorted(os.listdir(tmp_path))
    with running_program(KILLED, tmp_path, at) as process:
        assert process.stdout.readline() == "here\n"
        assert len(os.listdir(tmp_path)) > len(files)
        if at == "written":  # a concurrent save of another process does not delete its files
            jstep.save_weights(path, old, max_shard_bytes=64)
            assert len(os.listdir(tmp_path)) > len(files)
        process.kill()
    loaded = {float(x) for leaf in jstep.load_weights(tmp_path, old).values() for x in leaf.ravel()}
    assert loaded == ({1.0} if at in ("written", "1", "3") else {2.0})
    jstep.save_weights(path, old, max_shard_bytes=64)
    assert sorted(os.listdir(tmp_path)) == files
    assert jstep.load_weights(tmp_path, old)["c"].max() == 1
