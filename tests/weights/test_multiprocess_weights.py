"""Weights of several processes: each reads its part, the first one writes, and errors are raised on
all."""

import os

import numpy as np
import pytest
from processes import run
from safetensors_files import write_arrays

import jstep

SCRIPT = """
from jstep.weights import load
sizes = []
read_parts = load.read_parts
def counting(tensor, parts):
    arrays = read_parts(tensor, parts)
    sizes.extend(array.nbytes for array in arrays.values())
    return arrays
load.read_parts = counting

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
        for name, expected in {
            "r": w,
            "t": (w + 1).T,
            "whole": w + 2,
            "host": np.arange(3),
        }.items():
            np.testing.assert_array_equal(loaded[name], expected)
